// The weight of each backward pass in its update, beside what it should have been.
const passes = data.windows.flatMap((window, at) => window.micros.map((micro) => ({ at, window, micro })));
const bars = passes.filter(({ micro }) => micro[MICRO.terms].length);
// the term that went wrong most often is shown first
const wrongness = data.terms.map(() => 0);
for (const { micro } of bars) for (const term of micro[MICRO.terms]) wrongness[term[TERM.name]] += { off: 1, lost: 1, unknown: 1e-6 }[term[TERM.state]] || 0;
let termShown = Math.max(0, wrongness.indexOf(Math.max(...wrongness)));

const termOf = (bar) => bar.micro[MICRO.terms].find((term) => term[TERM.name] === termShown);
const STATES = [['right', 'as it should be'], ['off', 'off'], ['lost', 'lost: no step used it'], ['unknown', 'could not be told']];

function weightRows() {
  const of = (pick) => bars.map((bar) => { const term = termOf(bar); return term ? pick(term) : null; });
  const inState = (...states) => of((term) => (states.includes(term[TERM.state]) ? term[TERM.weight] : null));
  return [bars.map((_, place) => place), inState('right', 'unknown'), inState('off'), inState('lost'), of((term) => term[TERM.expected])];
}

function weightsChart() {
  const holder = byId('weights-chart');
  if (!bars.length || !data.terms.length) {
    absent(holder, 'No weight was read off a graph in this run.');
    return;
  }
  const paths = uPlot.paths.bars({ size: [0.62, 34], radius: 0.12 });
  const bar = (name, extra) => ({ label: name, paths, points: { show: false }, _tone: name, fill: () => colour(name), stroke: () => colour(name), width: 0, ...extra });
  const plot = chart(holder, {
    height: 250,
    padding: [10, 10, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: fromZero } },
    axes: [
      windowAxis(edges, { grid: { show: false } }),
      axis({ size: 58 }),
    ],
    series: [{}, bar('right'), bar('off'), bar('lost', { fill: () => 'transparent', width: 1.5, dash: [4, 3] }), { label: 'expected', paths: () => null, points: { show: false } }],
    hooks: { drawClear: [drawBands], draw: [drawExpected, drawUnknown] },
    plugins: [tip((_, place) => barText(bars[place]))],
  }, weightRows(), weightsLabel());
  holder.addEventListener('click', () => {
    if (plot.cursor.idx !== null && plot.cursor.idx !== undefined && bars[plot.cursor.idx]) select(bars[plot.cursor.idx].at);
  });
  watchers.push(() => plot.redraw(false));
  termPicker(plot);
  weightsLegend();
}

/** Places along x where the window of each of these passes begins and ends. */
function edgesOf(some) {
  const found = [];
  some.forEach(({ at }, place) => {
    const last = found[found.length - 1];
    if (last && last.at === at) last.to = place;
    else found.push({ at, from: place, to: place });
  });
  return found;
}

const edges = edgesOf(bars);

/** An axis over micro-batches that names their windows, as many as there is room for. */
function windowAxis(some, extra) {
  const splits = (self, _, low, high) => {
    const seen = some.filter((edge) => edge.to >= low && edge.from <= high);
    const every = Math.ceil(seen.length / Math.max(1, Math.floor(self.width / 62)));
    return seen.filter((_, place) => place % every === 0).map((edge) => (edge.from + edge.to) / 2);
  };
  const name = (place) => {
    const edge = some.find((one) => place >= one.from && place <= one.to);
    if (!edge) return '';
    const { stepped, index } = data.windows[edge.at];
    return stepped ? `${index}` : edge.at === data.windows.length - 1 ? 'no step' : `(${index})`;
  };
  return axis({ splits, values: (_, places) => places.map(name), space: 40, ...extra });
}

function drawBands(self) {
  const { ctx, bbox } = self;
  edges.forEach((edge, place) => {
    const left = self.valToPos(edge.from - 0.5, 'x', true), right = self.valToPos(edge.to + 0.5, 'x', true);
    const chosen = edge.at === selected;
    if (right < bbox.left || left > bbox.left + bbox.width || (place % 2 === 0 && !chosen)) return;
    ctx.save();
    ctx.fillStyle = colour(chosen ? 'note' : 'ink');
    ctx.globalAlpha = chosen ? 0.16 : 0.035;
    const from = Math.max(left, bbox.left), to = Math.min(right, bbox.left + bbox.width);
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    ctx.restore();
  });
}

function drawExpected(self) {
  const { ctx } = self;
  const half = Math.max(3, Math.min(24, Math.abs(self.valToPos(1, 'x', true) - self.valToPos(0, 'x', true)) * 0.42));
  ctx.save();
  ctx.strokeStyle = colour('ink');
  ctx.setLineDash([]); // the bars of lost micro-batches are dashed
  ctx.lineWidth = 2 * uPlot.pxRatio;
  ctx.beginPath();
  self.data[4].forEach((value, place) => {
    if (value === null || place < self.scales.x.min || place > self.scales.x.max) return;
    const x = self.valToPos(place, 'x', true), y = self.valToPos(value, 'y', true);
    ctx.moveTo(x - half, y);
    ctx.lineTo(x + half, y);
  });
  ctx.stroke();
  ctx.restore();
}

function drawUnknown(self) {
  const { ctx, bbox } = self;
  ctx.save();
  ctx.fillStyle = colour('muted');
  ctx.font = `700 ${13 * uPlot.pxRatio}px sans-serif`;
  ctx.textAlign = 'center';
  bars.forEach((bar, place) => {
    const term = termOf(bar);
    if (!term || term[TERM.weight] !== null || place < self.scales.x.min || place > self.scales.x.max) return;
    ctx.fillText('?', self.valToPos(place, 'x', true), bbox.top + bbox.height - 6 * uPlot.pxRatio);
  });
  ctx.restore();
}

function barText({ window, micro }) {
  const lines = [`${window.name}, micro-batch ${micro[MICRO.index]}`];
  for (const term of micro[MICRO.terms]) {
    const why = data.texts[term[TERM.why]];
    const weight = term[TERM.weight] === null ? `unknown${why ? `: ${why}` : ''}` : figure(term[TERM.weight]);
    lines.push(`${data.terms[term[TERM.name]]}: ${weight}, expected ${figure(term[TERM.expected])}${term[TERM.count] === null ? '' : `, ${figure(term[TERM.count])} terms`}`);
  }
  if (micro[MICRO.lost]) lines.push('lost: no step used its gradient');
  return lines.join('\n');
}

function stateCounts() {
  const counts = { right: 0, off: 0, lost: 0, unknown: 0 };
  for (const bar of bars) for (const term of bar.micro[MICRO.terms]) counts[term[TERM.state]] += 1;
  return counts;
}

function weightsLabel() {
  const counts = stateCounts();
  const said = STATES.filter(([state]) => counts[state]).map(([state, text]) => `${counts[state]} ${text}`);
  return `Weights of ${plural(bars.length, 'micro-batch')} in ${plural(edges.length, 'window')}: ${said.join(', ')}. The table below has the numbers of one window.`;
}

function weightsLegend() {
  const legend = byId('weights-legend'), counts = stateCounts();
  for (const [state, text] of STATES) {
    if (!counts[state]) continue;
    legend.appendChild(make('span')).append(make('i', `swatch ${state}`), document.createTextNode(`${text} (${counts[state].toLocaleString('en')})`));
  }
  legend.appendChild(make('span')).append(make('i', 'swatch expected'), document.createTextNode('what it should have been'));
  const left = data.left;
  const hints = ['Click a bar to see its window below; drag to zoom, double-click to zoom out.'];
  if (left.windows) hints.push(`${plural(left.windows, 'window')} left out of the page.`);
  if (left.microbatches) hints.push(`${plural(left.microbatches, 'micro-batch')} left out of the page.`);
  byId('weights-hint').textContent = hints.join(' ');
}

function termPicker(plot) {
  if (data.terms.length < 2) return;
  const label = make('label', '', 'Loss term'), picker = make('select');
  picker.id = 'term';
  label.htmlFor = 'term';
  data.terms.forEach((name, place) => {
    const option = picker.appendChild(make('option', '', name));
    option.value = place;
    option.selected = place === termShown;
  });
  picker.addEventListener('change', () => {
    termShown = Number(picker.value);
    plot.setData(weightRows());
  });
  byId('weights-terms').append(label, picker);
}
