// What every part of the page uses: the figures, elements made without markup, colours, numbers.
const data = JSON.parse(document.getElementById('figures').textContent);
const byId = (id) => document.getElementById(id);

/** An element with a class and text; text is never read as markup. */
function make(tag, className = '', text = '') {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== '') element.textContent = text;
  return element;
}

const KNOWN = new Set(['forward', 'backward', 'zero', 'clip', 'unscale', 'scale', 'step', 'schedule', 'write']);
const kindClass = (kind) => (KNOWN.has(kind) ? kind : 'other');

// A canvas needs colours that are resolved, in the scheme that is on.
const probe = document.body.appendChild(make('span'));
probe.hidden = true;
let colours = new Map();
function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

const redraws = [];
function redrawAll() {
  colours = new Map();
  for (const redraw of redraws) redraw();
}

/** At most four digits that count. */
function figure(value) {
  if (value === null || value === undefined) return '-';
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString('en');
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  if (value === null || value === undefined) return '-';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? Number(value.toPrecision(value < 100 ? 3 : 4)) : value} ${units[unit]}`;
}

function seconds(value) {
  if (!value) return '0 s';
  if (value < 1e-3) return `${figure(value * 1e6)} \u00b5s`;
  if (value < 1) return `${figure(value * 1e3)} ms`;
  return value < 120 ? `${figure(value)} s` : `${Math.floor(value / 60)} min`;
}

const plural = (count, word) =>
  `${count.toLocaleString('en')} ${word}${count === 1 ? '' : word.endsWith('ch') ? 'es' : 's'}`;

// A micro-batch and a term come as lists; these are their places.
const MICRO = { index: 0, place: 1, start: 2, end: 3, loss: 4, norm: 5, memory: 6, lost: 7, terms: 8 };
const TERM = { name: 0, weight: 1, expected: 2, count: 3, state: 4, why: 5 };
const EVENT = { kind: 0, place: 1, start: 2, length: 3, what: 4 };
const placeText = (place) => `${data.places[place][0]}:${data.places[place][1]}`;

// The window that all parts show.
let selected = 0;
const watchers = [];
function select(window) {
  selected = Math.max(0, Math.min(data.windows.length - 1, window));
  for (const watcher of watchers) watcher();
}
