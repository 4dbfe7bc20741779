// The table of all points: only the rows in sight exist, so that thousands sort, filter and scroll without lag.
const tableBox = document.getElementById('table');
const ROW_PX = 31;
const columns = [
  {name: 'engine', px: 340, text: i => config(i).text, key: i => config(i).text},
  {name: 'load', px: 74, text: i => points.load[i], key: i => points.size[i], numeric: true},
  {name: 'devices', px: 80, text: i => String(points.devices[i]), key: i => points.devices[i], numeric: true},
  {name: 'state', px: 140, text: i => points.state[i], key: i => points.state[i]},
  ...Object.keys(study.metrics).map(m => ({
    name: m, px: 100, metric: study.metrics[m], numeric: true, key: i => study.values[m][i],
    text: i => (study.values[m][i] === null ? '–' : number(study.metrics[m].factor * study.values[m][i])),
  })),
  {name: 'repeats', px: 80, text: i => String(points.repeats[i]), key: i => points.repeats[i], numeric: true},
  {name: 'point', px: 190, text: i => points.id[i], key: i => points.id[i]},
];
const searchable = points.id.map((id, i) => `${id} ${points.load[i]} ${points.state[i]} ${config(i).text}`.toLowerCase());
const sorting = {column: null, down: false};
let order = [];

const words = () => document.getElementById('filter').value.trim().toLowerCase().split(/\s+/).filter(Boolean);
const comparison = /^([a-z0-9_.]+)(<=|>=|<|>)(-?[0-9.]+(?:e-?\d+)?)$/;
const loads = new Set(points.load);
// "ttft_p99_ms<500" compares in the metric's own unit, "c8" is that load; any other word must occur in the row.
const test = word => {
  if (loads.has(word)) return i => points.load[i] === word;
  const [, metric, op, value] = comparison.exec(word) ?? [];
  if (metric && study.values[metric]) {
    const bound = {op, value: Number(value)};
    return i => study.values[metric][i] !== null && meets(bound, study.values[metric][i]);
  }
  return i => searchable[i].includes(word);
};

const refreshTable = () => {
  if (!tableBox) return;
  const tests = words().map(test);
  const scope = document.querySelector('input[name=scope]:checked').value;
  if (scope === 'front') tests.push(i => points.front[i]);
  if (scope === 'lost') tests.push(i => points.repeats[i] === 0);
  if (scope === 'sla') {
    const kept = new Set(answer?.feasible ?? []);
    tests.push(i => kept.has(i));
  }
  order = [];
  for (let i = 0; i < count; i++) if (tests.every(t => t(i))) order.push(i);
  if (sorting.column) {
    const {key} = sorting.column;
    const way = sorting.down ? -1 : 1;
    order.sort((a, b) => {
      const [u, v] = [key(a), key(b)];
      if (u === null || v === null) return (u === null) - (v === null);  // what was not measured comes last
      return way * (typeof u === 'number' ? u - v : u < v ? -1 : u > v ? 1 : 0) || a - b;
    });
  }
  document.getElementById('rows').textContent = `${order.length.toLocaleString('en-US')} of ${count.toLocaleString('en-US')} points`;
  paint(true);
};

let painted = [-1, -1];
const paint = (again, all = false) => {
  const first = all ? 0 : Math.max(0, Math.floor(tableBox.scrollTop / ROW_PX) - 10);
  const last = all ? Math.min(order.length, 300) : Math.min(order.length, first + Math.ceil(tableBox.clientHeight / ROW_PX) + 20);
  if (!again && painted[0] === first && painted[1] === last) return;
  painted = [first, last];
  const body = tableBox.querySelector('tbody');
  const space = height => element('tr', {class: 'space', style: `height:${height}px`});
  const made = order.slice(first, last).map(i => {
    const row = element('tr', {'data-point': i, tabindex: 0, class: points.front[i] ? 'front' : points.repeats[i] ? '' : 'lost'});
    if (answer?.chosen === i) row.classList.add('chosen');
    for (const c of columns) {
      row.append(element('td', {class: c.numeric ? 'number' : '', title: c.name === 'engine' ? c.text(i) : points.detail[i] ?? ''}, c.text(i)));
    }
    return row;
  });
  body.replaceChildren(space(first * ROW_PX), ...made, space((order.length - last) * ROW_PX));
};

const showDetail = i => {
  const box = document.getElementById('detail');
  box.hidden = false;
  box.replaceChildren(
    element('p', {}, element('strong', {}, points.id[i]), ` ${points.state[i]}, ${points.load[i]}: ${config(i).text}`),
    ...(points.detail[i] ? [element('p', {class: 'note'}, points.detail[i])] : []), commandLine(config(i).command));
};

if (tableBox) {
  const table = element('table', {id: 'points'});
  const head = element('tr');
  for (const c of columns) {
    const [label, unit] = c.metric ? [`${c.metric.label}\u00a0${c.metric.sign > 0 ? '↓' : '↑'}`, c.metric.unit] : [c.name, ''];
    const button = element('button', {type: 'button'}, label, element('br'), element('small', {}, unit));
    const cell = element('th', {scope: 'col', class: c.numeric ? 'number' : '', title: c.metric?.description ?? ''}, button);
    cell.style.width = `${c.px}px`;
    button.addEventListener('click', () => {
      sorting.down = sorting.column === c && !sorting.down;
      sorting.column = c;
      head.querySelectorAll('th').forEach(h => h.removeAttribute('aria-sort'));
      cell.setAttribute('aria-sort', sorting.down ? 'descending' : 'ascending');
      tableBox.scrollTop = 0;
      refreshTable();
    });
    head.append(cell);
  }
  table.style.width = `${columns.reduce((sum, c) => sum + c.px, 0)}px`;
  table.append(element('thead', {}, head), element('tbody'));
  tableBox.append(table);
  tableBox.addEventListener('scroll', () => requestAnimationFrame(() => paint(false)), {passive: true});
  document.getElementById('filter').addEventListener('input', () => { tableBox.scrollTop = 0; refreshTable(); });
  document.querySelectorAll('input[name=scope]').forEach(r => r.addEventListener('change', () => { tableBox.scrollTop = 0; refreshTable(); }));
  tableBox.addEventListener('click', event => {
    const row = event.target.closest('tr[data-point]');
    if (row) showDetail(Number(row.dataset.point));
  });
  tableBox.addEventListener('keydown', event => {
    const row = event.key === 'Enter' && event.target.closest('tr[data-point]');
    if (row) showDetail(Number(row.dataset.point));
  });
  window.addEventListener('beforeprint', () => paint(true, true));
  window.addEventListener('afterprint', () => paint(true));
}
begin();
refreshTable();
window.sweepReport = {pick, study};
performance.mark('sweep-ready');
