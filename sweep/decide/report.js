document.querySelectorAll('table.sortable').forEach(table => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(h => h.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => {
      const cell = row.cells[column];
      if (cell.dataset.sort !== undefined) return parseFloat(cell.dataset.sort);
      return cell.classList.contains('number') ? null : cell.textContent;
    };
    const rows = [...table.tBodies[0].rows].map(row => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === 'number' ? a - b : a.localeCompare(b);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
});
document.querySelectorAll('button.copy').forEach(button => button.addEventListener('click', async () => {
  const text = button.parentElement.querySelector('pre').textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page opened from a file may not have the clipboard: the older way still works
    const area = document.createElement('textarea');
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}));
