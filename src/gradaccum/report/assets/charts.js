// How every chart looks: axes, grid, size, the text beside the pointer, and what is read aloud.
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';

function axis(extra) {
  return {
    stroke: () => colour('muted'), font: FONT, gap: 5, size: 32,
    grid: { stroke: () => colour('line'), width: 1 },
    ticks: { stroke: () => colour('line'), width: 1, size: 4 },
    values: (_, splits) => splits.map((value) => (value === null ? '' : figure(value))),
    ...extra,
  };
}

/** Whole numbers only: there is no update 2.5. */
const wholeSteps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 1e5, 1e6, 1e7, 1e8, 1e9];

// Layout on paper is not known before it is printed: widths that fit A4 and letter with wide margins.
let onPaper = false;
const paperWidth = (holder) => (holder.closest('.grid figure:not(.wide)') ? 300 : 640);

function chart(holder, options, rows, label) {
  holder.setAttribute('role', 'img');
  holder.setAttribute('aria-label', label);
  const width = () => (onPaper ? paperWidth(holder) : Math.max(240, holder.clientWidth - 24));
  const made = new uPlot({
    width: width(), legend: { show: false },
    cursor: { y: false, points: { size: 7, width: 2, stroke: () => colour('card'), fill: (self, place) => self.series[place]._tone ? colour(self.series[place]._tone) : colour('ink') }, drag: { x: true, y: false } },
    ...options,
  }, rows, holder);
  const fit = () => made.setSize({ width: width(), height: options.height });
  new ResizeObserver(() => { if (Math.abs(made.width - width()) > 1) fit(); }).observe(holder);
  redraws.push(() => { fit(); made.redraw(false, true); });
  return made;
}

/** Text beside the pointer; `say` gives it for a place along x, or nothing. */
function tip(say) {
  let box;
  return {
    hooks: {
      init: (self) => {
        box = self.over.parentNode.appendChild(make('div', 'tip'));
        box.hidden = true;
      },
      setCursor: (self) => {
        const { idx, left } = self.cursor;
        const text = idx === null || idx === undefined || left < 0 ? '' : say(self, idx);
        box.hidden = !text;
        if (!text) return;
        box.textContent = text;
        const x = self.over.offsetLeft + left;
        const turn = left > self.over.clientWidth / 2;
        box.style.left = turn ? '' : `${x + 14}px`;
        box.style.right = turn ? `${self.over.parentNode.clientWidth - x + 14}px` : '';
        box.style.top = `${self.over.offsetTop + 6}px`;
      },
    },
  };
}

/** All of x with a little room; a single place in the middle. */
function spread(self, low, high) {
  const room = self.data[0].length < 2 ? 0.5 : (high - low) * 0.03;
  return [low - room, (self.data[0].length < 2 ? low : high) + room];
}

/** From zero to a little above the highest. */
function fromZero(_, low, high) {
  return [Math.min(0, low), high > 0 ? high * 1.12 : 1];
}

/** Logarithmic where the values span more than two powers of ten and none is zero. */
function yScale(values) {
  const seen = values.filter((value) => value !== null && value !== undefined);
  const low = Math.min(...seen), high = Math.max(...seen);
  return seen.length && low > 0 && high / low > 100 ? { distr: 3 } : { range: fromZero };
}

const absent = (holder, text) => holder.replaceWith(make('p', 'chart empty', text));
