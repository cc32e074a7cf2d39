"""The browser of kept rollouts: its place on the page, its script and its style.

Whatever a rollout holds was written by a model. The script puts every text on the page as text, and never as HTML.
"""

from collections.abc import Sequence
from html import escape

from truestep.report.rollouts import collect
from truestep.report.runs import Run


def rollouts_html(runs: Sequence[Run]) -> str:
    """Write the section with the rollouts that the runs kept; nothing where they kept none."""
    browser = collect(runs)
    if browser is None:
        return ""
    note = f'<p class="absent">{escape(browser.note)}</p>\n' if browser.note else ""
    if not browser.num_rows:
        return f'<h2 id="rollouts">Rollouts</h2>\n{note}'
    parts = "".join(
        f'<script type="text/plain" data-part="{name}">{text}</script>\n' for name, text in browser.packed.items()
    )
    return (
        '<h2 id="rollouts">Rollouts</h2>\n<div class="card rollouts">\n'
        f'<p class="empty">Reading the rollouts; this needs JavaScript.</p>\n{parts}</div>\n{note}'
    )


BROWSER_CSS = """
h2{scroll-margin-top:64px}
.rollouts{padding:14px 16px}
.filters{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px 14px;font-size:13px}
.filters label{display:block;color:var(--muted);min-width:0}
.filters .search{grid-column:span 2}
.filters span{display:flex;gap:4px}
.filters input,.filters select{font:inherit;color:var(--text);background:var(--page);border:1px solid var(--border);
border-radius:6px;padding:4px 7px;width:100%;min-width:0;height:30px}
.hists{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,220px),1fr));gap:12px 24px;margin:14px 0 4px}
.hist{font-size:11px;color:var(--muted)}
.hist .bars{display:flex;align-items:flex-end;gap:1px;height:44px;border-bottom:1px solid var(--border);margin:2px 0}
.hist .bars i{flex:1;background:var(--c0);min-width:0;border-radius:1px 1px 0 0}
.hist .ends{display:flex;justify-content:space-between}
.found{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;justify-content:space-between;margin:12px 0 4px;
font-size:13px;color:var(--muted)}
.found button{border:1px solid var(--border);border-radius:6px;padding:2px 10px;margin-left:6px}
.found button:disabled{opacity:.4;cursor:default}
.roll{border-top:1px solid var(--border)}
.roll>button{display:grid;width:100%;grid-template-columns:repeat(6,minmax(54px,auto)) minmax(0,1fr);gap:2px 16px;
padding:8px 0;text-align:left;font-size:13px;align-items:baseline}
.roll .cell small{display:block;color:var(--muted);font-size:11px}
.roll .excerpt{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;color:var(--muted);min-width:0}
.roll .flag{color:var(--warning)}
.roll .body{padding:2px 0 14px;display:grid;gap:10px}
.roll .body h4{margin:0 0 2px;font-size:12px;font-weight:600;color:var(--muted)}
.roll .text{max-height:420px}
.roll .text span{border-radius:2px}
.roll .more{font-size:13px;color:var(--muted);overflow-wrap:anywhere}
.roll .more button{border:1px solid var(--border);border-radius:6px;padding:1px 8px}
@media (max-width:700px){.roll>button{grid-template-columns:repeat(3,minmax(0,1fr))}.roll .excerpt{grid-column:1/-1}
.filters{grid-template-columns:repeat(2,minmax(0,1fr))}}
"""

BROWSER_SCRIPT = """
(async () => {
  const root = document.querySelector('.rollouts');
  if (!root) return;
  const PAGE = 20, BINS = 30;
  const make = (tag, className, parent, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const say = text => { root.querySelector('.empty').textContent = text; };
  const read = async name => {
    const letters = atob(root.querySelector('[data-part=' + name + ']').textContent);
    const bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    return JSON.parse(await new Response(stream).text());
  };
  await new Promise(done => setTimeout(done));
  let index, texts;
  try {
    index = await read('index');
    texts = await read('texts');
  } catch (error) {
    say('The rollouts cannot be read by this browser: ' + error);
    return;
  }
  const count = index.step.length;
  const numbers = name => Float64Array.from(index[name], value => value === null ? NaN : value);
  const columns = {};
  for (const name of ['step', 'reward', 'advantage', 'length', 'log_ratio', 'largest_log_ratio', 'entropy',
    'staleness'])
    columns[name] = numbers(name);
  const textAt = new Int32Array(count).fill(-1);
  texts.rows.forEach((row, at) => { textAt[row[0]] = at; });
  const lower = [];
  let prompts = null;

  const minus = text => text.replace('-', '\\u2212');
  const short = value => {
    if (Number.isNaN(value) || value === null) return '\\u2013';
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return minus(value.toExponential(1));
    return minus(String(Number(value.toPrecision(4))));
  };

  // The filters.
  root.querySelector('.empty').remove();
  const bar = make('div', 'filters', root);
  const inputs = {};
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(() => { first = 0; update(); }, 60); };
  const labelled = (title, className) => {
    const label = make('label', className, bar, title);
    return make('span', '', label);
  };
  const input = (name, parent, placeholder, type) => {
    const element = make('input', '', parent);
    element.type = type || 'text';
    element.placeholder = placeholder;
    element.setAttribute('aria-label', name.replace(/_/g, ' '));
    element.addEventListener('input', later);
    inputs[name] = element;
  };
  const choice = (name, title, options) => {
    const element = make('select', '', labelled(title));
    for (const [value, text] of options) make('option', '', element, text).value = value;
    element.addEventListener('change', later);
    inputs[name] = element;
  };
  input('search', labelled('Search in prompts and completions', 'search'), 'text', 'search');
  for (const [name, title] of [['step', 'Step'], ['reward', 'Reward'], ['length', 'Length'],
    ['largest_log_ratio', 'Largest |log-ratio|']]) {
    const place = labelled(title);
    input(name + '_from', place, 'from');
    input(name + '_to', place, 'to');
  }
  input('group', labelled('Group'), 'name');
  choice('kind', 'Which', [['', 'all'], ['trained', 'trained on'], ['rejected', 'rejected'], ['cut', 'truncated'],
    ['whole', 'not truncated'], ['text', 'with text'], ['tokens', 'with tokens']]);
  if (index.runs.length > 1)
    choice('run', 'Run', [['', 'all'], ...index.runs.map((name, at) => [String(at), name])]);
  choice('sort', 'Order', [['step', 'by step'], ['-step', 'newest first'], ['-reward', 'highest reward'],
    ['reward', 'lowest reward'], ['-length', 'longest'], ['length', 'shortest'],
    ['-largest_log_ratio', 'largest log-ratio'], ['-staleness', 'stalest']]);
  choice('colour', 'Tokens coloured by', [['log_ratio', 'log-ratio'], ['advantage', 'advantage'],
    ['logprob', 'log-prob'], ['', 'nothing']]);
  const hists = make('div', 'hists', root);
  const found = make('div', 'found', root);
  const counter = make('span', '', found);
  counter.setAttribute('role', 'status');
  const pager = make('span', '', found);
  const list = make('div', '', root);

  // Which rollouts there are to show.
  let matches = [], first = 0;
  const open = new Set();
  const value = name => inputs[name] ? inputs[name].value.trim() : '';
  const bound = (name, otherwise) => {
    const given = Number(value(name).replace('\\u2212', '-'));
    return value(name) === '' || Number.isNaN(given) ? otherwise : given;
  };
  const search = (wanted, row) => {
    const at = textAt[row];
    if (at < 0) return false;
    if (!prompts) prompts = texts.prompts.map(text => (text || '').toLowerCase());
    if (lower[at] === undefined) lower[at] = (texts.rows[at][3] || '').toLowerCase();
    return lower[at].includes(wanted) || prompts[texts.rows[at][2]].includes(wanted);
  };
  const select = () => {
    const ranges = ['step', 'reward', 'length', 'largest_log_ratio'].map(name =>
      [columns[name], bound(name + '_from', -Infinity), bound(name + '_to', Infinity)])
      .filter(([, from, to]) => from !== -Infinity || to !== Infinity);
    const kind = value('kind'), run = value('run'), wanted = value('search').toLowerCase(), group = value('group');
    const exact = index.groups.indexOf(group);
    const groups = group === '' ? null : index.groups.map((name, at) =>
      name !== null && (exact >= 0 ? at === exact : name.includes(group)));
    const chosen = [];
    rows: for (let row = 0; row < count; row++) {
      for (const [column, from, to] of ranges) if (!(column[row] >= from && column[row] <= to)) continue rows;
      if (groups && !groups[index.group[row]]) continue;
      if (run !== '' && index.run[row] !== Number(run)) continue;
      if (kind === 'trained' && index.rejected[row]) continue;
      if (kind === 'rejected' && !index.rejected[row]) continue;
      if (kind === 'cut' && index.truncated[row] !== 1) continue;
      if (kind === 'whole' && index.truncated[row] !== 0) continue;
      if (kind === 'text' && textAt[row] < 0) continue;
      if (kind === 'tokens' && (textAt[row] < 0 || !texts.rows[textAt[row]][5])) continue;
      if (wanted && !search(wanted, row)) continue;
      chosen.push(row);
    }
    const order = value('sort'), column = columns[order.replace('-', '')], sign = order[0] === '-' ? -1 : 1;
    if (order === '-step') chosen.reverse();
    else if (order !== 'step') {
      const key = row => Number.isNaN(column[row]) ? Infinity : sign * column[row];
      const keys = new Float64Array(count);
      for (const row of chosen) keys[row] = key(row);
      chosen.sort((a, b) => keys[a] - keys[b] || a - b);
    }
    return chosen;
  };

  const histogram = (title, column) => {
    let low = Infinity, high = -Infinity, total = 0, known = 0;
    for (const row of matches) {
      const at = column[row];
      if (Number.isNaN(at)) continue;
      low = Math.min(low, at);
      high = Math.max(high, at);
      total += at;
      known += 1;
    }
    const box = make('div', 'hist', hists);
    make('div', '', box, title + (known ? ', mean ' + short(total / known) : ''));
    const bars = make('div', 'bars', box);
    const counts = new Array(BINS).fill(0);
    for (const row of matches) {
      const at = column[row];
      const bin = high > low ? Math.min(BINS - 1, Math.floor((at - low) / (high - low) * BINS)) : 0;
      if (!Number.isNaN(at)) counts[bin] += 1;
    }
    const most = Math.max(1, ...counts);
    for (const bin of counts) make('i', '', bars).style.height = (bin ? Math.max(3, 100 * bin / most) : 0) + '%';
    const ends = make('div', 'ends', box);
    make('span', '', ends, known ? short(low) : '\\u2013');
    make('span', '', ends, known ? short(high) : '');
  };

  const coloured = (parent, row, stored) => {
    const by = value('colour'), tokens = stored[5];
    const column = {log_ratio: 2, advantage: 3, logprob: 1}[by];
    const scale = by === 'log_ratio' ? 1000 : 100;
    let values = tokens && column ? tokens[column] : null;
    if (tokens && by === 'advantage' && !values && !Number.isNaN(columns.advantage[row]))
      values = tokens[0].map(() => scale * columns.advantage[row]);
    if (!values) {
      make('div', 'text', parent, stored[3] === null ? '' : stored[3] || '(empty)');
      if (by && !tokens) make('div', 'more', parent, 'The values of its tokens are not in this page.');
      return;
    }
    const most = Math.max(1, ...values.filter(one => one !== null).map(Math.abs));
    const box = make('div', 'text', parent);
    tokens[0].forEach((piece, at) => {
      const span = make('span', '', box, piece);
      const one = values[at];
      if (one === null || one === undefined) return;
      const share = Math.round(70 * Math.abs(one) / most);
      const colour = one < 0 ? 'var(--c1)' : 'var(--c0)';
      if (share) span.style.background = 'color-mix(in srgb, ' + colour + ' ' + share + '%, transparent)';
      const shown = (list, by) => list && list[at] !== null ? short(list[at] / by) : '\\u2013';
      span.title = 'log-ratio ' + shown(tokens[2], 1000) + ', log-prob ' + shown(tokens[1], 100);
    });
    make('div', 'more', parent, 'Blue is above 0, orange below; the strongest is ' + short(most / scale) + '.');
  };

  const body = (parent, row) => {
    const box = make('div', 'body', parent), at = textAt[row];
    const facts = ['entropy ' + short(columns.entropy[row]), 'mean log-ratio ' + short(columns.log_ratio[row]),
      'staleness ' + short(columns.staleness[row])];
    if (index.runs.length > 1) facts.unshift(index.runs[index.run[row]]);
    const reason = index.reasons[index.rejected[row]];
    if (reason) make('div', 'more flag', box, 'Rejected: ' + reason);
    if (at < 0) {
      make('div', 'more', box, facts.join(' \\u00b7 '));
      make('div', 'more', box, 'Its text is not in this page; it is in the run\\u2019s directory.');
      return;
    }
    const stored = texts.rows[at];
    facts.unshift(stored[1] || '');
    for (const [name, part] of stored[4]) facts.push(name + ' ' + short(part));
    const more = make('div', 'more', box, facts.join(' \\u00b7 ') + ' ');
    const group = index.groups[index.group[row]];
    if (group !== null) {
      const button = make('button', '', more, 'show its group');
      button.type = 'button';
      button.addEventListener('click', () => {
        inputs.group.value = group;
        inputs.step_from.value = inputs.step_to.value = index.step[row];
        first = 0;
        update();
      });
    }
    const asked = make('div', '', box);
    make('h4', '', asked, 'Prompt');
    make('div', 'text', asked, texts.prompts[stored[2]] || '(empty)');
    const answered = make('div', '', box);
    make('h4', '', answered, 'Completion');
    coloured(answered, row, stored);
  };

  const card = row => {
    const item = make('div', 'roll', list), button = make('button', '', item);
    button.type = 'button';
    const cell = (title, text, className) => {
      const one = make('span', 'cell' + (className || ''), button);
      make('small', '', one, title);
      one.append(text);
    };
    const group = index.groups[index.group[row]];
    cell('step', short(columns.step[row]));
    cell('group', group === null ? '\\u2013' : group.slice(0, 14));
    cell('reward', short(columns.reward[row]));
    cell('advantage', short(columns.advantage[row]));
    cell('length', short(columns.length[row]) + (index.truncated[row] === 1 ? ' cut' : ''),
      index.truncated[row] === 1 ? ' flag' : '');
    if (index.rejected[row]) cell('', 'rejected', ' flag');
    else cell('|log-ratio|', short(columns.largest_log_ratio[row]));
    const at = textAt[row];
    make('span', 'excerpt', button, at < 0 ? '' : (texts.rows[at][3] || '').slice(0, 300).replace(/\\s+/g, ' '));
    const show = () => {
      button.setAttribute('aria-expanded', open.has(row));
      const there = item.querySelector('.body');
      if (there) there.remove();
      if (open.has(row)) body(item, row);
    };
    button.addEventListener('click', () => {
      if (!open.delete(row)) open.add(row);
      show();
    });
    show();
  };

  const update = () => {
    const start = performance.now();
    matches = select();
    hists.textContent = '';
    histogram('Reward', columns.reward);
    histogram('Length', columns.length);
    histogram('Largest |log-ratio|', columns.largest_log_ratio);
    draw();
    root.dataset.milliseconds = performance.now() - start;
    root.dataset.matches = matches.length;
  };
  const draw = () => {
    const last = Math.min(matches.length, first + PAGE);
    const searched = value('search') && texts.rows.length < count ?
      '; searched in the ' + texts.rows.length.toLocaleString('en-US') + ' with text' : '';
    const range = matches.length ? ', ' + (first + 1) + ' to ' + last + ' shown' : '';
    counter.textContent = matches.length.toLocaleString('en-US') + ' of ' + count.toLocaleString('en-US') +
      ' rollouts' + range + searched;
    pager.textContent = '';
    const ways = [['earlier', first - PAGE, first > 0], ['further', first + PAGE, last < matches.length]];
    for (const [text, to, can] of ways) {
      const button = make('button', '', pager, text);
      button.type = 'button';
      button.disabled = !can;
      button.addEventListener('click', () => { first = to; draw(); });
    }
    list.textContent = '';
    for (const row of matches.slice(first, last)) card(row);
  };
  update();
  root.dataset.ready = 'yes';
})();
"""
