// Puts the parts together, and follows the scheme, the paper and the keys.
if (data.windows.length) {
  for (const section of document.querySelectorAll('.plots')) section.hidden = false;
  timelineLegend();
  windowPicker();
  watchers.push(drawTimeline, microTable);
  weightsChart();
  growthCurve();
  windowCurve('change', data.windows.map((window) => window.change), 'Change of the parameters');
  windowCurve('norm', data.windows.map((window) => window.norm), 'Norm of the gradient');
  lossCurve();
  memoryCurve();
  byId('not-measured').textContent = notMeasured.length ? `Not measured in this run: ${notMeasured.join(', ')}.` : '';
  const first = data.windows.findIndex((window) => windowFlag(window));
  select(first < 0 ? 0 : first);
}
for (const table of document.querySelectorAll('table.sortable')) sortable(table);
filterParameters();

const root = document.documentElement;
const theme = byId('theme');
const THEMES = ['auto', 'light', 'dark'];
theme.hidden = false;
theme.addEventListener('click', () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme || 'auto') + 1) % THEMES.length];
  if (next === 'auto') delete root.dataset.theme;
  else root.dataset.theme = next;
  theme.textContent = `Theme: ${next}`;
  redrawAll();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);

// Paper is light, and narrower than the screen.
let before;
addEventListener('beforeprint', () => {
  before = root.dataset.theme;
  root.dataset.theme = 'light';
  onPaper = true;
  redrawAll();
});
addEventListener('afterprint', () => {
  onPaper = false;
  if (before) root.dataset.theme = before;
  else delete root.dataset.theme;
  redrawAll();
});
