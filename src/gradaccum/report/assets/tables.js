// The table of a window's micro-batches, and tables that sort and filter.
function microTable() {
  const window = data.windows[selected], table = byId('micros');
  table.caption.textContent = `Micro-batches of ${window.name}`;
  const many = window.micros.some((micro) => micro[MICRO.terms].length > 1);
  const columns = [['#'], ['Line'], ['Loss', 'num'], ...(many ? [['Term']] : []), ['Weight', 'num'], ['Expected', 'num'], ['Terms', 'num'], ['Gradient after', 'num'], ['Peak memory', 'num']];
  const head = make('tr');
  for (const [name, kind] of columns) {
    const cell = head.appendChild(make('th', kind || '', name));
    cell.scope = 'col';
  }
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...window.micros.flatMap((micro) => microRows(micro, many)));
  if (!window.micros.length) {
    const cell = table.tBodies[0].appendChild(make('tr')).appendChild(make('td', 'quiet', window.count ? 'Left out of the page; the JSON report has them.' : 'No backward pass in this window.'));
    cell.colSpan = columns.length;
  }
}

function microRows(micro, many) {
  const terms = micro[MICRO.terms].length ? micro[MICRO.terms] : [null];
  return terms.map((term, place) => {
    const row = make('tr');
    // what belongs to the micro-batch stands once, beside all of its terms
    const whole = (cell) => { cell.rowSpan = terms.length; return place ? [] : [cell]; };
    const number = make('th', '', `${micro[MICRO.index]}`);
    number.scope = 'row';
    row.append(
      ...whole(number), ...whole(textCell(placeText(micro[MICRO.place]), 'mono')), ...whole(make('td', 'num', figure(micro[MICRO.loss]))),
      ...(many ? [textCell(term ? data.terms[term[TERM.name]] : '-')] : []), ...weightCells(micro, term),
      ...whole(make('td', 'num', figure(micro[MICRO.norm]))), ...whole(make('td', 'num', bytes(micro[MICRO.memory]))),
    );
    return row;
  });
}

const textCell = (text, kind = '') => make('td', text.length > 40 ? `${kind} long` : kind, text);

function weightCells(micro, term) {
  if (!term) return [make('td', 'num quiet', 'not read'), make('td', 'num', '-'), make('td', 'num', '-')];
  const unknown = term[TERM.weight] === null;
  const weight = make('td', `num${term[TERM.state] === 'off' || micro[MICRO.lost] ? ' bad' : ''}`, unknown ? 'unknown' : `${figure(term[TERM.weight])}${micro[MICRO.lost] ? ', lost' : ''}`);
  if (unknown) weight.title = data.texts[term[TERM.why]];
  return [weight, make('td', 'num', figure(term[TERM.expected])), make('td', 'num', figure(term[TERM.count]))];
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = make('button', '', head.textContent);
    button.type = 'button';
    head.replaceChildren(button);
    button.addEventListener('click', () => sortBy(table, head, column));
  });
}

function sortBy(table, head, column) {
  const down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = (row) => row.cells[column].textContent.trim();
  const compare = head.classList.contains('num')
    ? (a, b) => asNumber(value(a)) - asNumber(value(b))
    : (a, b) => value(a).localeCompare(value(b), 'en', { numeric: true });
  const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
  table.tBodies[0].append(...rows);
}

const asNumber = (text) => { const found = Number(text.replaceAll(',', '')); return Number.isNaN(found) ? (text === 'inf' ? Infinity : -Infinity) : found; };

function filterParameters() {
  const table = byId('parameter-table');
  if (!table) return;
  const text = byId('filter-text'), trouble = byId('filter-trouble'), rows = [...table.tBodies[0].rows];
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    for (const row of rows) {
      row.hidden = (wanted && !row.cells[0].textContent.toLowerCase().includes(wanted)) || (trouble.checked && !row.classList.contains('troubled'));
    }
    byId('filter-count').textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  text.addEventListener('input', apply);
  trouble.addEventListener('change', apply);
  byId('filter').hidden = rows.length < 8;
  apply();
}
