// SLA sliders: move one, and the pick, the fronts and the table follow.
const bounds = new Map();  // metric -> {metric, op, value}
const panel = document.getElementById('pick');
let target = study.target;

const outwards = (value, sign) => {  // three digits, rounded so that the value itself still meets the bound
  if (value === 0) return 0;
  const step = 10 ** (Math.floor(Math.log10(Math.abs(value))) - 2);
  const rounded = (sign > 0 ? Math.ceil : Math.floor)(value / step - sign * 1e-9) * step;
  return Number(rounded.toPrecision(3));
};

// The values a slider offers, tightest first: what was measured, rounded; never more than 200.
const offered = metric => {
  const {sign} = study.metrics[metric];
  const values = study.values[metric].filter((v, i) => v !== null && points.comparable[i]).map(v => outwards(v, sign));
  const distinct = [...new Set(values)].sort((a, b) => sign * (a - b));
  const step = Math.max(1, Math.ceil(distinct.length / 200));
  return distinct.filter((_, i) => i % step === 0 || i === distinct.length - 1);
};

const rows = new Map();
const addSlider = metric => {
  const {label, unit, factor, sign, description} = study.metrics[metric];
  const values = offered(metric);
  const slider = element('input', {type: 'range', min: 0, max: values.length, step: 1, value: values.length,
    id: `slider-${metric}`, 'aria-label': `bound on ${label}`});
  const field = element('input', {type: 'number', step: 'any', placeholder: 'none', 'aria-label': `bound on ${label} in ${unit}`});
  const op = sign > 0 ? '<=' : '>=';
  const set = value => {
    if (value === null) bounds.delete(metric); else bounds.set(metric, {metric, op, value});
    answerAll();
  };
  slider.addEventListener('input', () => {
    const value = values[slider.value] ?? null;
    field.value = value === null ? '' : Number((factor * value).toPrecision(6));
    set(value);
  });
  const typed = value => {
    const place = values.findIndex(v => sign * (v - value) >= 0);
    slider.value = value === null || place < 0 ? values.length : place;
    set(value);
  };
  field.addEventListener('change', () => typed(field.value === '' ? null : Number(field.value) / factor));
  rows.set(metric, {begin: value => { field.value = Number((factor * value).toPrecision(6)); typed(value); }});
  const row = element('div', {class: 'slider', title: description},
    element('label', {for: `slider-${metric}`}, label), slider,
    element('span', {class: 'bound'}, sign > 0 ? '≤ ' : '≥ ', field, element('span', {class: 'unit'}, unit)));
  document.getElementById('sliders').append(row);
};

const against = i => {  // the best of vLLM's defaults among what meets the SLA
  const theirs = answer.feasible.find(j => points.baseline[j]);
  if (points.baseline[i]) return 'These are vLLM’s defaults.';
  if (theirs === undefined) {
    return points.baseline.some(Boolean) ? 'vLLM’s defaults do not meet this SLA at any measured load.'
      : 'vLLM’s defaults were not measured.';
  }
  const [ours, other] = [study.values[target][i], study.values[target][theirs]];
  const change = other ? ` (${ours > other ? '+' : '−'}${Math.abs(100 * (ours - other) / other).toFixed(1)} %)` : '';
  return `vLLM’s defaults at their best load here (${points.load[theirs]}) have ${valueText(target, other)}; `
    + `this has ${valueText(target, ours)}${change}.`;
};

const sureness = (bound, i) => {
  const end = (study.metrics[bound.metric].sign > 0 ? study.high : study.low)[bound.metric][i];
  if (end === null) return ['unknown', 'measured once: no spread known'];
  return meets(bound, end) ? ['sure', '95 % interval keeps it'] : ['unsure', `95 % interval reaches ${valueText(bound.metric, end)}`];
};

const boundItems = (i, misses) => [...bounds.values()].map((bound, k) => {
  const missed = misses && misses[k] > 0;
  const [kind, text] = missed ? ['missed', `missed by ${(100 * misses[k]).toFixed(1)} %`] : sureness(bound, i);
  const value = valueText(bound.metric, study.values[bound.metric][i]);
  return element('li', {class: kind}, `${study.metrics[bound.metric].label} ${value} `,
    `(${bound.op === '<=' ? '≤' : '≥'} ${valueText(bound.metric, bound.value)}): `, element('span', {}, text));
});

const barred = () => (study.barred.length ? [element('p', {class: 'note'},
  `Formats that took no part, not shown to be non-inferior: ${study.barred.join('; ')}.`)] : []);

const commandLine = text => {
  const button = element('button', {class: 'copy', type: 'button'}, 'Copy');
  return element('div', {class: 'line'}, element('pre', {}, text), button);
};

const showPick = () => {
  panel.replaceChildren();
  if (!answer) {
    panel.append(element('p', {}, 'No measured point that may be picked has all of these metrics.'), ...barred());
    return;
  }
  const i = answer.chosen ?? answer.nearest;
  const found = answer.chosen !== undefined;
  const verb = study.metrics[target].sign > 0 ? 'lowest' : 'highest';
  panel.dataset.point = found ? points.id[i] : '';
  panel.dataset.nearest = found ? '' : points.id[i];
  panel.className = found ? 'feasible' : 'infeasible';
  panel.append(
    element('p', {class: 'lead'}, found ? `${answer.feasible.length.toLocaleString('en-US')} points meet it; pick:`
      : 'No measured point meets this SLA. Nearest:'),
    element('p', {class: 'config'}, config(i).text),
    element('p', {}, `at ${points.load[i]} on ${points.devices[i]} device${points.devices[i] === 1 ? '' : 's'}, `,
      element('strong', {}, valueText(target, study.values[target][i])), ` (${study.metrics[target].label})`));
  if (bounds.size) {
    panel.append(element('ul', {class: 'bounds'}, ...boundItems(i, answer.misses)));
  }
  if (found) {
    panel.append(element('p', {}, against(i)));
    if (answer.ties.length) {
      panel.append(element('p', {}, `${answer.ties.length} more within ${100 * study.tie_fraction} % of the ${verb}: a tie goes to `
        + 'the fewest settings of its own.'));
    }
    if (answer.runnerUp !== undefined) {
      panel.append(element('p', {}, `Runner-up: ${config(answer.runnerUp).text} at ${points.load[answer.runnerUp]}, `
        + `${valueText(target, study.values[target][answer.runnerUp])}.`));
    }
    panel.append(commandLine(config(i).command));
  }
  panel.append(...barred());
  const sla = [...bounds.values()].map(boundText).join(' ');
  const way = study.metrics[target].sign > 0 ? '--minimize' : '--maximize';
  panel.append(element('p', {class: 'note'}, 'The same in a terminal, with confidence, headroom and replicas:'),
    commandLine(`sweep pick ${study.folder}${sla ? ` --sla "${sla}"` : ''} ${way} ${target}`));
};

let redraw = 0;
const answerAll = () => {
  answer = pick([...bounds.values()], target);
  if (answer) answer.bounded = bounds.size > 0;
  showPick();
  clearTimeout(redraw);
  redraw = setTimeout(() => {  // the slow part when a slider rests, so that it never lags
    document.querySelectorAll('.panels figure:not([hidden])').forEach(showAnswer);
    refreshTable();
  }, 90);
};

const begin = () => {
  if (!target) return;
  study.sliders.forEach(addSlider);
  const choice = document.getElementById('target');
  for (const [name, {label, unit, sign}] of Object.entries(study.metrics)) {
    choice.append(element('option', {value: name}, `${sign > 0 ? 'lowest' : 'highest'} ${label} (${unit})`));
  }
  choice.value = target;
  choice.addEventListener('change', () => { target = choice.value; answerAll(); });
  document.getElementById('no-bounds').addEventListener('click', () => {
    bounds.clear();
    document.querySelectorAll('#sliders input[type=range]').forEach(s => { s.value = s.max; });
    document.querySelectorAll('#sliders input[type=number]').forEach(f => { f.value = ''; });
    answerAll();
  });
  for (const {metric, value} of study.start) rows.get(metric)?.begin(value);
  answerAll();
};
