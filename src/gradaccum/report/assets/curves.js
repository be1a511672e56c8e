// Curves over micro-batches, updates and time.
const line = (tone, extra) => ({ label: tone, _tone: tone, stroke: () => colour(tone), width: 2, points: { show: false }, ...extra });
const holderOf = (id) => byId(id).querySelector('.chart');

/** A curve of what was not measured is not shown; one line says which. */
const notMeasured = [];
function missing(id) {
  byId(id).hidden = true;
  notMeasured.push(byId(id).querySelector('figcaption').firstChild.textContent.trim().toLowerCase());
}

/** Growth of the gradient: one faint line for each window, the chosen one strong. */
function growthCurve() {
  const longest = Math.max(0, ...data.windows.map((window) => window.micros.length));
  const norms = (window) => Array.from({ length: longest }, (_, place) => (window.micros[place] ? window.micros[place][MICRO.norm] : null));
  const known = data.windows.filter((window) => window.micros.some((micro) => micro[MICRO.norm] !== null));
  if (!known.length) return missing('growth');
  if (longest < 2) return absent(holderOf('growth'), 'Every window has one micro-batch: nothing grows.');
  const every = Math.ceil(known.length / 40), faint = known.filter((_, place) => place % every === 0);
  const rows = () => [Array.from({ length: longest }, (_, place) => place), ...faint.map(norms), norms(data.windows[selected])];
  const plot = chart(holderOf('growth'), {
    height: 210,
    scales: { x: { time: false, range: (_, low, high) => [low - 0.3, high + 0.3] }, y: yScale(known.flatMap(norms)) },
    axes: [axis({ incrs: wholeSteps, space: 30 }), axis({ size: 58 })],
    series: [{}, ...faint.map(() => line('lost', { width: 1, alpha: 0.55 })), line('off', { width: 2.5, stroke: () => colour('ink'), _tone: 'ink', points: { show: true, size: 6, fill: () => colour('ink'), stroke: () => colour('ink') } })],
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    plugins: [tip((self, place) => {
      const value = self.data[self.data.length - 1][place];
      return value === null ? '' : `${data.windows[selected].name}, after micro-batch ${place}: ${figure(value)}`;
    })],
  }, rows(), `Norm of the gradient after each micro-batch, one line for each of ${plural(faint.length, 'window')}.`);
  watchers.push(() => plot.setData(rows()));
  return undefined;
}

const TONES = ['note', 'backward', 'fine', 'off', 'right', 'warning'];

/** One value for each window, over the index of its update; a line for each optimizer. */
function windowCurve(id, values, name) {
  const points = data.windows.map((window, place) => [window, values[place]])
    .filter(([window, value]) => window.stepped && value !== null)
    .sort((a, b) => a[0].index - b[0].index);
  const seen = points.map(([, value]) => value);
  if (!seen.length) return missing(id);
  const owners = [...new Set(points.map(([window]) => window.optimizer))].sort((a, b) => a - b).slice(0, TONES.length);
  const dots = (tone) => ({ show: seen.length < 80, size: 6, fill: () => colour(tone), stroke: () => colour(tone) });
  chart(holderOf(id), {
    height: 210,
    scales: { x: { time: false, range: spread }, y: yScale(seen) },
    axes: [axis({ incrs: wholeSteps, space: 40 }), axis({ size: 62 })],
    series: [{}, ...owners.map((_, place) => line(TONES[place], { spanGaps: true, points: dots(TONES[place]) }))],
    plugins: [tip((_, place) => `${points[place][0].name}${owners.length > 1 ? `, ${ownerName(points[place][0].optimizer)}` : ''}: ${figure(seen[place])}`)],
  }, [points.map(([window]) => window.index), ...owners.map((owner) => points.map(([window, value]) => (window.optimizer === owner ? value : null)))],
  `${name}, over ${plural(seen.length, 'update')}: first ${figure(seen[0])}, last ${figure(seen[seen.length - 1])}.`);
  if (owners.length > 1) holderOf(id).before(ownersLegend(owners));
  return undefined;
}

const ownerName = (owner) => (owner === null ? 'no optimizer' : data.optimizers[owner] || `optimizer ${owner}`);

function ownersLegend(owners) {
  const legend = make('div', 'legend');
  owners.forEach((owner, place) => {
    legend.appendChild(make('span')).append(make('i', `swatch tone-${TONES[place]}`), document.createTextNode(ownerName(owner)));
  });
  return legend;
}

function lossCurve() {
  const known = passes.filter(({ micro }) => micro[MICRO.loss] !== null);
  const seen = known.map(({ micro }) => micro[MICRO.loss]);
  if (!seen.length) return missing('loss');
  chart(holderOf('loss'), {
    height: 210,
    scales: { x: { time: false, range: spread }, y: {} },
    axes: [windowAxis(edgesOf(known)), axis({ size: 62 })],
    series: [{}, line('right', { points: { show: seen.length < 80, size: 5, fill: () => colour('right'), stroke: () => colour('right') } })],
    plugins: [tip((_, place) => `${known[place].window.name}, micro-batch ${known[place].micro[MICRO.index]}: ${figure(seen[place])}`)],
  }, [known.map((_, place) => place), seen], `Loss of ${plural(seen.length, 'micro-batch')}.`);
  return undefined;
}

function memoryCurve() {
  const [times, sizes] = data.memory;
  if (times.length < 2) return missing('memory');
  const low = Math.min(...sizes), high = Math.max(...sizes);
  // a small change on a large base would be a flat line: then the scale does not begin at zero
  const close = low > 0 && (high - low) / high < 0.25;
  const room = Math.max((high - low) * 0.15, high * 0.01);
  chart(holderOf('memory'), {
    height: 220,
    scales: { x: { time: false }, y: { range: close ? () => [low - room, high + room] : fromZero } },
    axes: [axis({ values: timeLabels, space: 70 }), axis({ size: 84, values: (_, splits) => splits.map(bytes), incrs: binarySteps(high) })],
    series: [{}, line('fine', { width: 1.5, fill: () => (close ? 'transparent' : colour('fine-tint')) })],
    plugins: [tip((_, place) => `${seconds(times[place])}: ${bytes(sizes[place])}`)],
  }, [times, sizes], `Memory from ${seconds(times[0])} to ${seconds(times[times.length - 1])}: ${bytes(low)} to ${bytes(high)}.`);
  return undefined;
}

/** Times with as many digits as tell one mark from the next. */
function timeLabels(self, splits) {
  const step = splits.length > 1 ? splits[1] - splits[0] : 1;
  if (step >= 60) return splits.map((at) => `${Math.round(at / 60)} min`);
  const [unit, name] = step < 1e-3 && splits[splits.length - 1] < 0.1 ? [1e-3, 'ms'] : [1, 's'];
  let digits = 0;
  while (digits < 6 && Math.abs(step / unit * 10 ** digits - Math.round(step / unit * 10 ** digits)) > 1e-6) digits += 1;
  return splits.map((at) => `${(at / unit).toFixed(digits)} ${name}`);
}

/** Steps that are round in powers of 1024. */
function binarySteps(highest) {
  const unit = 1024 ** Math.floor(Math.log2(Math.max(1, highest)) / 10);
  return [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 250, 500].map((step) => step * unit);
}
