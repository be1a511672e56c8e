// One window: what happened at which line, in the order in which it did, or to scale in time.
const ROW = 34;
const LETTERS = { forward: 'F', backward: 'B', zero: 'Z', clip: 'C', unscale: 'U', scale: 'A', step: 'S', schedule: 'R', write: 'W', mode: 'M', sync: 'Y' };

const letterOf = (kind) => LETTERS[kind] || kind.charAt(0).toUpperCase();

function drawTimeline() {
  const window = data.windows[selected];
  const lanes = byId('lanes');
  lanes.replaceChildren();
  byId('detail').textContent = '';
  if (!window.events || !window.events.length) {
    lanes.append(make('p', 'empty', window.events ? 'No event was recorded in this window.' : 'The events of this window are left out to keep the page small; the JSON report has them.'));
    return;
  }
  const events = window.events;
  const rows = [...new Set(events.map((event) => event[EVENT.place]))].sort(
    (a, b) => data.places[a][0].localeCompare(data.places[b][0]) || data.places[a][1] - data.places[b][1]);
  lanes.append(laneNames(rows), lanePlot(window, events, rows));
}

function laneNames(rows) {
  const names = make('div', 'lane-names');
  names.append(make('div', 'lane-head', 'line'));
  const files = new Set(rows.map((row) => data.places[row][0]));
  for (const row of rows) {
    const [path, line, text] = data.places[row];
    const name = make('div', 'lane-name');
    name.title = `${path}:${line}  ${text}`;
    const short = path.split('/').pop();
    const at = make('bdi', 'at', files.size > 1 || !text ? `${short}:${line}` : `${line}`);
    at.dir = 'ltr';
    name.append(at, make('bdi', '', text));
    names.append(name);
  }
  return names;
}

/** Where each event begins and how wide it is, in shares of the plot. */
function spans(window, events) {
  if (document.querySelector('input[name="scale"]:checked').value === 'order') {
    return events.map((_, place) => [place / events.length, 1 / events.length]);
  }
  const whole = Math.max(1, (window.end - window.start) * 1e6, ...events.map((event) => event[EVENT.start] + event[EVENT.length]));
  return events.map((event) => [event[EVENT.start] / whole, event[EVENT.length] / whole]);
}

function lanePlot(window, events, rows) {
  const plot = make('div', 'lane-plot');
  const inner = plot.appendChild(make('div', 'lane-inner'));
  inner.style.height = `${ROW * (rows.length + 1)}px`;
  inner.style.minWidth = `${Math.min(20000, events.length * 22)}px`;
  const at = spans(window, events);
  inner.append(...parts(window, events, at));
  rows.forEach((_, place) => {
    const row = inner.appendChild(make('div', 'lane-row'));
    row.style.top = `${ROW * (place + 1)}px`;
  });
  const blocks = events.map((event, place) => block(window, event, place, at[place], rows));
  const group = inner.appendChild(make('div'));
  group.setAttribute('role', 'toolbar');
  group.setAttribute('aria-label', 'Events in order; arrow keys go from one to the next');
  group.append(...blocks);
  rove(group, blocks);
  return plot;
}

/** Bands behind the blocks: one for each micro-batch, and one for what follows the last. */
function parts(window, events, at) {
  const bounds = [];
  let micro = 0;
  events.forEach((event, place) => {
    const key = partOf(window, event, micro);
    micro = key;
    const [left, width] = at[place];
    const last = bounds[bounds.length - 1];
    if (last && last.key === key) last.right = Math.max(last.right, left + width);
    else bounds.push({ key, left, right: left + width });
  });
  return bounds.map(({ key, left, right }, place) => {
    const end = place + 1 < bounds.length ? bounds[place + 1].left : Math.max(right, left);
    const part = make('div', place % 2 ? 'part odd' : 'part');
    part.style.left = `${left * 100}%`;
    part.style.width = `${(end - left) * 100}%`;
    const label = part.appendChild(make('span'));
    if (key < window.micros.length) label.append(make('i', 'word', 'micro-batch '), document.createTextNode(key));
    else label.textContent = window.stepped ? 'update' : 'after';
    return part;
  });
}

function partOf(window, event, from) {
  const start = window.start + event[EVENT.start] / 1e6;
  let micro = from;
  // a microsecond is what the times are rounded to
  while (micro < window.micros.length && start >= window.micros[micro][MICRO.end] - 1e-6) micro += 1;
  return micro;
}

function block(window, event, place, [left, width], rows) {
  const kind = data.kinds[event[EVENT.kind]];
  const made = make('button', `block ${kindClass(kind)}`, letterOf(kind));
  made.type = 'button';
  made.style.left = `calc(${left * 100}% + 1px)`;
  made.style.width = `max(3px, calc(${width * 100}% - 2px))`;
  made.style.top = `${ROW * (rows.indexOf(event[EVENT.place]) + 1) + 5}px`;
  const what = data.texts[event[EVENT.what]];
  const [, , text] = data.places[event[EVENT.place]];
  const said = `${place + 1} of ${window.events.length}: ${kind} at ${placeText(event[EVENT.place])}` +
    `${what ? ` (${what})` : ''}, ${seconds(event[EVENT.length] / 1e6)}${text ? ` - ${text}` : ''}`;
  made.setAttribute('aria-label', said);
  made.title = said;
  const show = () => {
    for (const other of made.parentNode.querySelectorAll('[aria-current]')) other.removeAttribute('aria-current');
    made.setAttribute('aria-current', 'true');
    byId('detail').textContent = said;
  };
  made.addEventListener('focus', show);
  made.addEventListener('click', show);
  made.addEventListener('mouseenter', () => { byId('detail').textContent = said; });
  return made;
}

/** One stop for the tab key; arrows, Home and End go from block to block. */
function rove(group, blocks) {
  blocks.forEach((one, place) => { one.tabIndex = place ? -1 : 0; });
  group.addEventListener('keydown', (key) => {
    const now = blocks.indexOf(document.activeElement);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: blocks.length - 1 }[key.key];
    if (next === undefined || !blocks[next]) return;
    key.preventDefault();
    blocks[now].tabIndex = -1;
    blocks[next].tabIndex = 0;
    blocks[next].focus();
  });
}

function timelineLegend() {
  const legend = byId('timeline-legend');
  for (const kind of data.kinds) {
    const entry = legend.appendChild(make('span'));
    entry.append(make('i', `swatch kind ${kindClass(kind)}`, letterOf(kind)), document.createTextNode(kind));
  }
}

function windowPicker() {
  const picker = byId('window');
  data.windows.forEach((window, place) => {
    const option = make('option', '', `${window.name}: ${plural(window.count, 'micro-batch')}${windowFlag(window)}`);
    option.value = place;
    picker.append(option);
  });
  picker.addEventListener('change', () => select(Number(picker.value)));
  byId('window-back').addEventListener('click', () => select(selected - 1));
  byId('window-on').addEventListener('click', () => select(selected + 1));
  for (const radio of document.querySelectorAll('input[name="scale"]')) radio.addEventListener('change', drawTimeline);
  watchers.push(() => {
    picker.value = selected;
    byId('window-back').disabled = selected === 0;
    byId('window-on').disabled = selected === data.windows.length - 1;
  });
}

function windowFlag(window) {
  const states = new Set(window.micros.flatMap((micro) => micro[MICRO.terms].map((term) => term[TERM.state])));
  if (states.has('lost')) return ', lost';
  if (states.has('off')) return ', weights off';
  return states.has('unknown') ? ', some unknown' : '';
}
