// The browser of rollouts. Whatever a rollout holds was written by a model: every text is put on the page as text.
(async () => {
  const root = document.querySelector('.rollouts');
  if (!root) return;
  const PAGE = 20, BINS = 30, CUT = 600;  // CUT: characters of a text that its line is made from
  const say = text => { root.querySelector('.empty').textContent = text; };
  const read = name => unpack(root.querySelector('[data-part=' + name + ']'));
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
  if (index.ended)
    choice('ended', 'Ended by', [['', 'all'], ...index.ends.map((name, at) => [String(at), name === null ? 'unknown' : name])]);
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
    const given = Number(value(name).replace('\u2212', '-'));
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
    const kind = value('kind'), run = value('run'), ended = value('ended'), wanted = value('search').toLowerCase(), group = value('group');
    const exact = index.groups.indexOf(group);
    const groups = group === '' ? null : index.groups.map((name, at) =>
      name !== null && (exact >= 0 ? at === exact : name.includes(group)));
    const chosen = [];
    rows: for (let row = 0; row < count; row++) {
      for (const [column, from, to] of ranges) if (!(column[row] >= from && column[row] <= to)) continue rows;
      if (groups && !groups[index.group[row]]) continue;
      if (run !== '' && index.run[row] !== Number(run)) continue;
      if (ended !== '' && index.ended[row] !== Number(ended)) continue;
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

  // A histogram is drawn once, and gets new numbers with every filter. Dragging over it filters.
  const histogram = (title, column, filter) => {
    const box = make('div', 'hist', hists), head = make('div', '', box), place = make('div', '', box);
    const colour = () => colourOf('c0'), stroke = () => colourOf('muted');
    let plot = null, ends = [0, 1];
    const size = () => Math.max(120, place.clientWidth);
    const open = counts => new uPlot({
      width: size(), height: 92, legend: {show: false}, padding: [6, 14, 0, 0],
      scales: {x: {time: false, range: () => ends}, y: {range: (own, low, high) => [0, Math.max(1, high)]}},
      series: [{}, {fill: colour, stroke: colour, width: 0, paths: uPlot.paths.bars({size: [1], gap: 1, align: 1}), points: {show: false}}],
      axes: [
        {stroke, grid: {show: false}, ticks: {show: false}, font: FONT, size: 20, gap: 4, space: 56,
          values: (own, places, axis, space, step) => ticks(places, step)},
        {stroke, grid: {show: false}, ticks: {show: false}, font: FONT, gap: 4, space: 30, size: roomFor,
          incrs: [1, 2, 5].flatMap(digit => [0, 1, 2, 3, 4, 5].map(power => digit * 10 ** power)).sort((a, b) => a - b),
          values: (own, places, axis, space, step) => ticks(places, step)},
      ],
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false}, bind: {dblclick: () => () => null}},
      hooks: {
        setCursor: [own => {
          const at = own.cursor.left >= 0 ? own.cursor.idx : null, width = (ends[1] - ends[0]) / BINS;
          const low = own.data[0][at], count = own.data[1][at];
          place.title = at === null || count === undefined ? '' : short(low) + ' to ' + short(low + width) + ': ' + short(count);
        }],
        setSelect: [own => {
          if (own.select.width < 3 || !filter) return;
          const [from, to] = [own.select.left, own.select.left + own.select.width].map(left => own.posToVal(left, 'x'));
          own.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          inputs[filter + '_from'].value = Number(from.toPrecision(4));
          inputs[filter + '_to'].value = Number(to.toPrecision(4));
          first = 0;
          update();
        }],
      },
    }, counts, place);
    addEventListener('resize', () => plot && plot.setSize({width: size(), height: 92}));
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => plot && plot.redraw());
    return () => {
      let low = Infinity, high = -Infinity, total = 0, known = 0;
      for (const row of matches) {
        const at = column[row];
        if (Number.isNaN(at)) continue;
        low = Math.min(low, at);
        high = Math.max(high, at);
        total += at;
        known += 1;
      }
      head.textContent = title + (known ? ': mean ' + short(total / known) + ', ' + short(low) + ' to ' + short(high) : ': none');
      box.classList.toggle('none', !known);
      if (!known) return;
      if (!(high > low)) [low, high] = [low - Math.max(0.5, 0.01 * Math.abs(low)), high + Math.max(0.5, 0.01 * Math.abs(high))];
      const counts = new Array(BINS).fill(0), width = (high - low) / BINS;
      for (const row of matches)
        if (!Number.isNaN(column[row])) counts[Math.min(BINS - 1, Math.floor((column[row] - low) / width))] += 1;
      ends = [low, high];
      const values = [counts.map((_, bin) => low + bin * width), counts];
      if (!plot) {
        plot = open(values);
        withFinger(plot.over);
      } else plot.setData(values);
    };
  };

  // How tokens are coloured: `paint` puts the text of labels into a box, `note` says what colours mean.
  const colouring = (row, stored) => {
    const by = value('colour'), tokens = stored[5];
    const column = {log_ratio: 2, advantage: 3, logprob: 1}[by];
    const scale = by === 'log_ratio' ? 1000 : 100;
    let values = tokens && column ? tokens[column] : null;
    if (tokens && by === 'advantage' && !values && !Number.isNaN(columns.advantage[row]))
      values = tokens[0].map(() => scale * columns.advantage[row]);
    if (!values) return {
      paint: (box, text) => { box.textContent = text || '(empty)'; },
      note: by && !tokens ? 'The values of its tokens were not kept: raise logging.rollouts.with_tokens to keep those of more.' : '',
    };
    const most = Math.max(1, ...values.filter(one => one !== null).map(Math.abs));
    const token = (box, at) => {
      const span = make('span', '', box, plain(tokens[0][at]));
      const one = values[at];
      if (one === null || one === undefined) return;
      const share = Math.round(70 * Math.abs(one) / most);
      const colour = one < 0 ? 'var(--c1)' : 'var(--c0)';
      if (share) span.style.background = 'color-mix(in srgb, ' + colour + ' ' + share + '%, transparent)';
      const shown = (list, by) => list && list[at] !== null ? short(list[at] / by) : '\u2013';
      span.title = 'log-ratio ' + shown(tokens[2], 1000) + ', log-prob ' + shown(tokens[1], 100);
    };
    return {
      paint: (box, text, from = 0, count = tokens[0].length) => {
        if (from + count > tokens[0].length) box.textContent = text;  // the values of these were not kept
        else for (let at = from; at < from + count; at++) token(box, at);
      },
      note: 'Colour of a token: blue above 0, orange below, full at ' + short(most / scale) + '.' +
        (values.some(one => one) ? '' : ' All of these round to 0.'),
    };
  };

  const body = (parent, row) => {
    const box = make('div', 'body', parent), at = textAt[row];
    const facts = ['entropy ' + short(columns.entropy[row]), 'mean log-ratio ' + short(columns.log_ratio[row]),
      'staleness ' + short(columns.staleness[row])];
    if (index.ended && index.ends[index.ended[row]] !== null) facts.unshift('ended by ' + index.ends[index.ended[row]]);
    if (index.runs.length > 1) facts.unshift(index.runs[index.run[row]]);
    const reason = index.reasons[index.rejected[row]];
    if (reason) make('div', 'more flag', box, 'Rejected: ' + reason);
    if (at < 0) {
      make('div', 'more', box, facts.join(' \u00b7 '));
      make('div', 'more', box, 'Its text is not in this page; it is in the run\u2019s directory.');
      return;
    }
    const stored = texts.rows[at];
    facts.unshift(plain(stored[1] || ''));
    for (const [name, part] of stored[4]) facts.push(name + ' ' + short(part));
    const more = make('div', 'more', box, facts.join(' \u00b7 ') + ' ');
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
    const {paint, note} = colouring(row, stored);
    if (stored[6]) conversation(box, stored[6], paint);
    else {
      const asked = make('div', '', box);
      make('h4', '', asked, 'Prompt');
      make('div', 'text', asked, texts.prompts[stored[2]] || '(empty)');
      const answered = make('div', '', box);
      make('h4', '', answered, 'Completion');
      paint(make('div', 'text', answered), stored[3]);
    }
    if (note) make('div', 'more', box, note);
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
    cell('group', group === null ? '\u2013' : group.slice(0, 14));
    cell('reward', short(columns.reward[row]));
    cell('advantage', short(columns.advantage[row]));
    cell('length', short(columns.length[row]) + (index.truncated[row] === 1 ? ' cut' : ''),
      index.truncated[row] === 1 ? ' flag' : '');
    if (index.rejected[row]) cell('', 'rejected', ' flag');
    else cell('|log-ratio|', short(columns.largest_log_ratio[row]));
    const at = textAt[row];
    const excerpt = make('span', 'excerpt', button);
    if (at >= 0) {
      const line = text => plain(text.replace(/\s+/g, ' ').trim());
      const whole = text => text.replace(/^[\udc00-\udfff]|[\ud800-\udbff]$/g, '');  // no half of a pair at a cut
      const prompt = texts.prompts[texts.rows[at][2]] || '', completion = texts.rows[at][3] || '';
      const asked = line(whole(prompt.slice(-CUT)));
      const isCut = asked.length > 60 || prompt.length > CUT;
      excerpt.append((isCut ? '\u2026' + whole(asked.slice(-59)) : asked) + ' \u2192 ');
      make('b', '', excerpt, whole(line(whole(completion.slice(0, CUT))).slice(0, 300)) || '(empty)');
      const parts = texts.rows[at][4].map(([name, part]) => name + ' ' + short(part)).join(' \u00b7 ');
      if (parts) {
        make('br', '', excerpt);
        make('span', 'parts', excerpt, parts);
      }
    }
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
    for (const show of shapes) show();
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
  const shapes = [
    histogram('Reward', columns.reward, 'reward'), histogram('Length in tokens', columns.length, 'length'),
    histogram('Mean log-ratio', columns.log_ratio, null),
    histogram('Largest |log-ratio|', columns.largest_log_ratio, 'largest_log_ratio'),
  ];
  update();
  root.dataset.ready = 'yes';
})();
