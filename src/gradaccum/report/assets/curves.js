// Curves over micro-batches, updates and time.
const line = (tone, extra) => ({ label: tone, _tone: tone, stroke: () => colour(tone), width: 2, points: { show: false }, ...extra });
const holderOf = (id) => byId(id).querySelector('.chart');

/** Growth of the gradient: one faint line for each window, the chosen one strong. */
function growthCurve() {
  const longest = Math.max(0, ...data.windows.map((window) => window.micros.length));
  const norms = (window) => Array.from({ length: longest }, (_, place) => (window.micros[place] ? window.micros[place][MICRO.norm] : null));
  const known = data.windows.filter((window) => window.micros.some((micro) => micro[MICRO.norm] !== null));
  if (!known.length) return absent(holderOf('growth'), 'No gradient norm was read.');
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
      return value === null ? '' : `${windowName(data.windows[selected])}, after micro-batch ${place}: ${figure(value)}`;
    })],
  }, rows(), `Norm of the gradient after each micro-batch, one line for each of ${plural(faint.length, 'window')}.`);
  watchers.push(() => plot.setData(rows()));
  return undefined;
}

/** One value for each window, over the index of its update. */
function windowCurve(id, tone, values, name) {
  const stepped = data.windows.map((window, place) => [window, values[place]]).filter(([window]) => window.stepped);
  const points = stepped.sort((a, b) => a[0].index - b[0].index);
  const seen = points.map(([, value]) => value);
  if (!seen.some((value) => value !== null)) return absent(holderOf(id), 'Not measured in this run.');
  chart(holderOf(id), {
    height: 210,
    scales: { x: { time: false, range: spread }, y: yScale(seen) },
    axes: [axis({ incrs: wholeSteps, space: 40 }), axis({ size: 62 })],
    series: [{}, line(tone, { points: { show: seen.length < 80, size: 6, fill: () => colour(tone), stroke: () => colour(tone) } })],
    plugins: [tip((self, place) => (seen[place] === null ? '' : `${windowName(points[place][0])}: ${figure(seen[place])}`))],
  }, [points.map(([window]) => window.index), seen], `${name}, over ${plural(seen.length, 'update')}: first ${figure(seen[0])}, last ${figure(seen[seen.length - 1])}.`);
  return undefined;
}

function lossCurve() {
  const seen = bars.map((bar) => bar.micro[MICRO.loss]);
  if (!seen.some((value) => value !== null)) return absent(holderOf('loss'), 'The loss was not read in this run.');
  chart(holderOf('loss'), {
    height: 210,
    scales: { x: { time: false, range: spread }, y: {} },
    axes: [axis({ splits: windowCentres, values: (_, places) => places.map(windowLabel), space: 40 }), axis({ size: 62 })],
    series: [{}, line('right', { points: { show: seen.length < 80, size: 5, fill: () => colour('right'), stroke: () => colour('right') } })],
    plugins: [tip((_, place) => (seen[place] === null ? '' : `${windowName(bars[place].window)}, micro-batch ${bars[place].micro[MICRO.index]}: ${figure(seen[place])}`))],
  }, [bars.map((_, place) => place), seen], `Loss of ${plural(seen.length, 'micro-batch')}.`);
  return undefined;
}

function memoryCurve() {
  const [times, sizes] = data.memory;
  if (times.length < 2) return absent(holderOf('memory'), 'Memory was not measured in this run.');
  chart(holderOf('memory'), {
    height: 220,
    scales: { x: { time: false }, y: { range: fromZero } },
    axes: [axis({ values: (_, splits) => splits.map(seconds), space: 70 }), axis({ size: 78, values: (_, splits) => splits.map(bytes), incrs: binarySteps(Math.max(...sizes)) })],
    series: [{}, line('fine', { width: 1.5, fill: () => colour('fine-tint') })],
    plugins: [tip((_, place) => `${seconds(times[place])}: ${bytes(sizes[place])}`)],
  }, [times, sizes], `Memory over ${seconds(times[times.length - 1])}: at most ${bytes(Math.max(...sizes))}.`);
  return undefined;
}

/** Steps that are round in powers of 1024. */
function binarySteps(highest) {
  const unit = 1024 ** Math.floor(Math.log2(Math.max(1, highest)) / 10);
  return [0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 250, 500].map((step) => step * unit);
}
