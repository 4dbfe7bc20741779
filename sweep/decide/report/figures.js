// Figures are drawn when they come near the window, and fronts fade what misses the SLA.
const figureSpecs = new Map([...document.querySelectorAll('script.figure')].map(s => [s.dataset.key, s]));
const canvasGl = (() => {
  try { return Boolean(document.createElement('canvas').getContext('webgl')); } catch { return false; }
})();
const template = JSON.parse(document.getElementById('template').textContent);
const GL_ONLY = ['parcoords', 'scatter3d', 'mesh3d'];
let answer = null;  // what pick() said last; the fronts show it

// A figure's JSON, made to fit a holder of this width.
const load = (key, width) => {
  const spec = JSON.parse(figureSpecs.get(key).textContent);
  for (const trace of spec.data) {
    if (trace.customdata && !trace.hovertext) {
      trace.hovertext = trace.customdata.map(i => (i === null ? '' : points.hover[i]));
    }
    if (trace.type === 'scattergl' && !canvasGl) trace.type = 'scatter';
    if (trace.customdata && trace.marker && !trace.type.endsWith('3d')) {
      trace.unselected = {marker: {opacity: 0.05}};
    }
  }
  const {layout} = spec;
  layout.template = template;
  if (width < 640) {  // the second half of an axis title goes to a line of its own
    for (const axis of [layout.xaxis, layout.yaxis]) {
      if (axis?.title?.text) axis.title.text = axis.title.text.replace(' <span', '<br><span');
    }
  }
  if (width < 480) fitPhone(spec);
  return spec;
};

const fitPhone = ({data, layout}) => {
  layout.margin = {...layout.margin, l: 46, r: 10, b: 40};
  layout.font = {...layout.font, size: 11};
  for (const axis of [layout.xaxis, layout.yaxis]) {
    if (axis) axis.title = {...axis.title, font: {size: 11}};
  }
  if (layout.yaxis?.tickfont) layout.yaxis.tickfont.size = 10;
  if (!layout.scene) {
    layout.legend = {...layout.legend, orientation: 'h', x: 0, xanchor: 'left', y: layout.yaxis2 ? -0.04 : -0.2, yanchor: 'top',
      title: {text: ''}};
  }
  if (data.some(t => t.marker?.coloraxis)) {  // the scale lies on top
    const bar = layout.coloraxis.colorbar;
    layout.coloraxis.colorbar = {...bar, orientation: 'h', y: 1, yanchor: 'bottom', x: 0.5, thickness: 9,
      title: {...bar.title, text: bar.title.text.replace('<br>', ' '), side: 'top'}};
    layout.margin.t = 76;
  }
  for (const trace of data) {  // long names on the left would leave no room for what they name
    if (trace.type === 'heatmap' || trace.error_x) trace.y = trace.y.map(breakName);
  }
  for (const trace of data) {
    if (trace.name?.length > 38) trace.name = `${trace.name.slice(0, 37)}…`;
    if (trace.type === 'waterfall') layout.xaxis.tickangle = -60;
  }
  if (layout.yaxis2) {  // the failures below need the room
    layout.xaxis.title.text = layout.xaxis.title.text.replace(/<br><span.*$/, '');
    layout.annotations?.forEach(note => { note.text = note.text.replace(/:.*$/, ''); });
  }
  if (layout.yaxis?.categoryarray) layout.yaxis.categoryarray = layout.yaxis.categoryarray.map(breakName);
  if (data.some(t => t.type === 'heatmap')) {
    layout.xaxis.tickangle = -60;
    layout.margin.t = 110;
    layout.height = 180 + 40 * data[0].y.length;
  }
  const parallel = data.find(t => t.type === 'parcoords');
  if (parallel) layout.width = 110 * parallel.dimensions.length;
};
const breakName = name => (typeof name === 'string' ? name.replace(/(.{14,20}?[_=. ])(?=.{4})/g, '$1<br>') : name);

const drawn = new Set();
const draw = holder => {
  const {key} = holder.dataset;
  if (drawn.has(key)) return;
  drawn.add(key);
  const plot = holder.querySelector('.plot');
  const spec = load(key, plot.clientWidth);
  if (!canvasGl && spec.data.some(t => GL_ONLY.includes(t.type))) {
    plot.textContent = 'This figure needs WebGL, which this browser does not offer.';
    return;
  }
  const axes = holder.dataset.axes ? holder.dataset.axes.split(' ') : [];
  if (axes.length) spec.data.push(pickMarker(axes));
  plot.style.minHeight = '';
  Plotly.newPlot(plot, spec.data, spec.layout, {displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d']}).then(() => {
    plot.on('plotly_click', event => {
      const i = event.points[0].customdata;
      if (Number.isInteger(i)) { copyCommand(i); showDetail(i); }
    });
    if (axes.length && answer) showAnswer(holder);
  });
};

const pickMarker = axes => ({
  type: axes.length === 3 ? 'scatter3d' : 'scatter', mode: 'markers', x: [], y: [], ...(axes.length === 3 && {z: []}),
  name: 'your pick', hoverinfo: 'skip',
  marker: {symbol: axes.length === 3 ? 'diamond' : 'star', size: axes.length === 3 ? 9 : 22, color: '#F0E442',
    line: {width: 2, color: '#222222'}},
});

// Fade what misses the SLA, and mark the pick; in one redraw, for thousands of markers take a while.
const showAnswer = holder => {
  const plot = holder.querySelector('.plot');
  if (!plot.data || !answer) return;
  const axes = holder.dataset.axes.split(' ');
  const mark = plot.data.at(-1);
  const at = answer.chosen ?? answer.nearest;
  const place = axes.map(name => study.values[name]?.[at] ?? null);
  place.forEach((value, k) => { mark['xyz'[k]] = place.includes(null) ? [] : [value]; });
  mark.name = answer.chosen === undefined ? 'nearest' : 'your pick';
  const kept = new Set(answer.feasible);
  for (const trace of plot.data) {
    if (!trace.customdata || trace.yaxis === 'y2' || axes.length === 3) continue;
    trace.selectedpoints = answer.bounded ? trace.customdata.flatMap((i, k) => (kept.has(i) ? [k] : [])) : null;
  }
  Plotly.react(plot, plot.data, plot.layout);
};

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    draw(entry.target);
  }
}, {rootMargin: '300px'});

// One front at a time: each may hold several WebGL contexts, and a browser has few.
for (const tabs of document.querySelectorAll('.tabs')) {
  const buttons = [...tabs.querySelectorAll('[role=tab]')];
  const panels = buttons.map(b => document.getElementById(b.getAttribute('aria-controls')));
  const show = chosen => buttons.forEach((button, k) => {
    button.setAttribute('aria-selected', String(k === chosen));
    panels[k].hidden = k !== chosen;
    if (k === chosen) return draw(panels[k]);
    if (drawn.delete(panels[k].dataset.key)) Plotly.purge(panels[k].querySelector('.plot'));
  });
  buttons.forEach((button, k) => button.addEventListener('click', () => show(k)));
  show(0);
}
for (const holder of document.querySelectorAll('figure[data-key]')) {
  if (!holder.closest('.panels')) watcher.observe(holder);
}
