// A rollout of several turns as a conversation: a box for each turn, and a heading where a sequence begins.
// A block is [sequence, whether its tokens are labels, tokens, text, role of a turn that begins, its reward,
// seconds of drawing, seconds of the environment, [[tool, calls, seconds], ...], malformed calls]; missing at the end.
const seconds = value => value < 1e-3 ? short(value * 1e6, 3) + ' \u00b5s' : value < 1 ? short(value * 1e3, 3) + ' ms' :
  short(value, 3) + ' s';
const times = (count, what) => short(count) + ' ' + what + (count === 1 ? '' : 's');

// `paint(box, text, at, count)` puts the text of `count` labels, from number `at`, into a box.
const conversation = (parent, [leftOut, blocks], paint) => {
  const box = make('div', 'conversation', parent);
  const several = blocks.length > 0 && blocks[blocks.length - 1][0] > 0;
  let sequence = -1, at = 0, turn = null;
  for (const [number, isLabel, count, text, role, reward, drawing, environment, tools, malformed] of blocks) {
    const begins = number !== sequence;
    if (begins && several)
      make('div', 'sequence', box, 'Sequence ' + (number + 1) + (number ? ': the past was rewritten' : ''));
    if (begins || typeof role === 'string') {
      const kind = isLabel ? ' policy' : /^(tool|ipython|function|environment)$/.test(role) ? ' answer' : '';
      turn = make('div', 'turn' + kind, box);
      const head = make('div', 'head', turn);
      make('b', '', head, plain(typeof role === 'string' ? role : number ? 'the past' : 'prompt'));
      const known = value => value !== null && value !== undefined;
      if (known(reward)) make('span', 'pill', head, 'reward ' + short(reward));
      for (const [name, calls, spent] of tools || [])
        make('span', 'pill call', head, 'calls ' + plain(name) + (calls === 1 ? '' : ' \u00d7 ' + short(calls)) +
          (known(spent) ? ', ' + seconds(spent) : ''));
      if (malformed) make('span', 'pill flag', head, times(malformed, 'malformed call'));
      if (known(drawing)) make('span', '', head, 'drawn in ' + seconds(drawing));
      if (known(environment)) make('span', '', head, 'answered in ' + seconds(environment));
    }
    sequence = number;
    const part = make('div', isLabel ? 'labels' : 'masked', turn);
    const place = make('div', 'text', part);
    if (isLabel) {
      paint(place, text || '', at, count);
      at += count;
    } else place.textContent = text || '';
    make('div', 'count', part, times(count, isLabel ? 'label' : 'token') + (isLabel ? '' : ', masked'));
  }
  if (leftOut) make('div', 'more', box, times(leftOut, 'further token') + ' were not kept.');
};
