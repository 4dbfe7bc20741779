// The pick, by the rules of sweep/decide/pick.py, on the columns of `study`. No drawing here.
const study = JSON.parse(document.getElementById('study').textContent);
const points = study.points;
const count = points.id.length;

const meets = (bound, value) => ({
  '<=': value <= bound.value, '>=': value >= bound.value, '<': value < bound.value, '>': value > bound.value,
})[bound.op];

const relativeMiss = (bound, value) => {
  if (meets(bound, value)) return 0;
  const scale = Math.abs(bound.value) || Math.abs(value);
  return scale ? Math.abs(value - bound.value) / scale : 0;
};

// bounds: [{metric, op, value}]. Gives {feasible, chosen, runnerUp, ties} as point numbers, best first, or, when no point
// meets them, {feasible: [], nearest, misses}. Null when no point has all these metrics.
const pick = (bounds, target) => {
  const names = [target, ...bounds.map(b => b.metric)];
  const sign = study.metrics[target].sign;
  const value = study.values[target];
  const order = (a, b) => sign * (value[a] - value[b]) || points.overrides[a] - points.overrides[b]
    || (points.id[a] < points.id[b] ? -1 : 1);
  const candidates = [];
  for (let i = 0; i < count; i++) {
    if (points.comparable[i] && names.every(m => study.values[m][i] !== null)) candidates.push(i);
  }
  if (!candidates.length) return null;
  const feasible = candidates.filter(i => bounds.every(b => meets(b, study.values[b.metric][i]))).sort(order);
  if (!feasible.length) {
    const misses = i => bounds.map(b => relativeMiss(b, study.values[b.metric][i]));
    const largest = new Map(candidates.map(i => [i, Math.max(...misses(i))]));
    const nearest = candidates.sort((a, b) => largest.get(a) - largest.get(b) || order(a, b))[0];
    return {feasible, nearest, misses: misses(nearest)};
  }
  const best = value[feasible[0]];
  const ties = feasible.filter(i => Math.abs(value[i] - best) <= study.tie_fraction * Math.abs(best));
  const chosen = ties.reduce((a, b) => (points.overrides[b] < points.overrides[a] ? b : a));
  const runnerUp = feasible.find(i => points.config[i] !== points.config[chosen]);
  return {feasible, chosen, runnerUp, ties: ties.filter(i => i !== chosen)};
};

const number = value => Math.abs(value) >= 1000
  ? Math.round(value).toLocaleString('en-US') : String(Number(value.toPrecision(4)));
const valueText = (metric, value) => {
  const {factor, unit} = study.metrics[metric];
  return value === null ? 'not measured' : `${number(factor * value)} ${unit}`;
};
const boundText = b => `${b.metric}${b.op}${b.value}`;
const config = i => study.configs[points.config[i]];

// Text only: whatever comes from a study never becomes markup.
const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const say = text => {
  const toast = document.getElementById('toast');
  toast.textContent = text;
  toast.classList.add('shown');
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove('shown'), 2500);
};

const copy = async (text, what) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page opened from a file may not have the clipboard: the older way still works
    const area = element('textarea');
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  say(`Copied: ${what}`);
};
const copyCommand = i => copy(config(i).command, `the vllm serve command of ${points.id[i]}`);

document.addEventListener('click', event => {
  const button = event.target.closest('button.copy');
  if (button) copy(button.parentElement.querySelector('pre').textContent, 'the command');
});
