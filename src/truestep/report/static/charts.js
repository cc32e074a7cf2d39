// The charts: lines and areas over an axis of choice, drawn by uPlot from the numbers that the page has.
(() => {
  const HEIGHT = 228, WIDEST = [0, 0.01, 0.025, 0.05, 0.1];
  const state = {axis: null, smoothing: 0.025, zoom: null, logs: new Map(), hidden: new Set(), log: false};
  let data = null, whole = [0, 1], seen = null, sized = null;
  const drawn = new Map();  // figures with their chart

  // The points of a line: [places along the axis, values, rows of its table], in the order of the places.
  const pointsOf = (at, values) => {
    const [table, rows] = data.places[at], places = data.tables[table][state.axis];
    let points = values.map((value, index) => [places[rows ? rows[index] : index], value, rows ? rows[index] : index]);
    points = points.filter(point => point[0] !== null);
    if (points.some((point, index) => index && points[index - 1][0] > point[0])) points.sort((a, b) => a[0] - b[0]);
    return {x: points.map(point => point[0]), y: points.map(point => point[1])};
  };

  // A mean with weights that fall off linearly, over so many neighbours on each side; of logarithms on such an axis.
  const smoothed = ({x, y}, half, log) => {
    const used = value => value !== null && (!log || value > 0);
    const levels = y.map(value => used(value) ? log ? Math.log(value) : value : 0);
    return {x, y: y.map((value, centre) => {
      if (value === null) return null;
      let sum = 0, weights = 0;
      for (let at = Math.max(0, centre - half); at <= Math.min(y.length - 1, centre + half); at++) {
        if (!used(y[at])) continue;
        const weight = half + 1 - Math.abs(at - centre);
        sum += weight * levels[at];
        weights += weight;
      }
      return !weights ? value : log ? Math.exp(sum / weights) : sum / weights;
    })};
  };

  // What is drawn of a chart: for each line what was logged, and a smoothed line where that is asked for.
  const layersOf = (chart, log) => {
    const layers = [], notes = new Set();
    chart.lines.forEach((line, number) => {
      const raw = pointsOf(line.at, line.values);
      const base = line.means ? pointsOf(line.meansAt, line.means) : raw;
      const half = chart.smooth ? Math.floor(state.smoothing * base.x.length) : 0;
      const mean = half >= 2 ? smoothed(base, half, log) : null;
      const around = Math.max(1, Math.round(half * line.count / Math.max(1, base.x.length)));
      if (mean) notes.add('\u00b1' + around.toLocaleString('en-US'));
      if (chart.stacked) layers.push({line, number, points: mean || base, kind: 'area'});
      else {
        layers.push({line, number, points: raw, kind: mean ? 'faint' : 'line'});
        if (mean) layers.push({line, number, points: mean, kind: 'mean'});
      }
    });
    return {layers, note: notes.size ? 'mean of ' + [...notes].join(', ') + ' steps' + (chart.stacked ? '' : '; faint: as logged') : ''};
  };

  const joined = layers => {
    const tables = layers.map(({points}) => [points.x, points.y]);
    return tables.length ? uPlot.join(tables) : [[], []];
  };
  // Areas lie one on the other: each reaches up to the sum of those below it and its own.
  const stackedUp = (rows, hidden) => {
    const sums = new Array(rows[0].length).fill(0);
    return [rows[0], ...rows.slice(1).map((row, number) => row.map((value, at) => {
      if (!hidden(number)) sums[at] += value || 0;
      return sums[at];
    }))];
  };

  const verticalRange = (chart, log) => (plot, low, high) => {
    if (low === null || high === null || low === undefined) return log ? [0.1, 1] : [0, 1];
    if (log) {
      if (!(low > 0)) low = high > 0 ? high / 1e6 : 0.1;
      if (!(high > low)) high = low * 10;
      return uPlot.rangeLog(low, high, 10, high / low >= 10);
    }
    if (chart.reference !== null) [low, high] = [Math.min(low, chart.reference), Math.max(high, chart.reference)];
    if ((chart.zero || chart.stacked) && low >= 0) low = 0;
    const least = Math.max(chart.least, 2e-4 * Math.max(Math.abs(low), Math.abs(high)), 1e-28);
    if (high - low < least) {
      const middle = chart.reference !== null ? chart.reference : (low + high) / 2;
      [low, high] = [Math.min(low, middle - least), Math.max(high, middle + least)];
    }
    const pad = 0.06 * (high - low);
    return [low === 0 || (chart.zero && low >= 0) ? 0 : low - pad, high + pad];
  };

  const seriesOf = ({line, kind, number}, chart) => {
    const colour = kind === 'area' && line.dashed ? paler(colourOf('c' + line.colour)) : colourOf('c' + line.colour);
    const dots = kind === 'line' && line.count <= 30;
    const lower = line.below !== null, dash = kind === 'area' ? [] : line.dashed ? [2, 5] : lower ? [] : overlying(chart, line) ? [7, 7] : [];
    return {
      stroke: colour, dash, scale: 'y', show: !state.hidden.has(chart.title + '\n' + line.name),
      fill: kind === 'area' ? colour : undefined,
      width: kind === 'faint' ? 1 : kind === 'area' ? 0 : lower ? 3 : 2, alpha: kind === 'faint' ? 0.3 : 1,
      points: {show: dots ? true : undefined, size: 6, fill: colour, stroke: colour},
    };
  };
  const paler = colour => {
    const [ours, card] = [colour, colourOf('card')].map(hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)));
    return 'rgb(' + ours.map((part, at) => Math.round(0.45 * part + 0.55 * card[at])).join(',') + ')';
  };
  const overlying = (chart, line) => chart.lines.some(other => other.below === line.name);

  const axesOf = chart => {
    const stroke = colourOf('muted'), grid = {stroke: colourOf('grid'), width: 1}, none = {show: false};
    const clock = state.axis === 'clock';
    const incrs = clock ? [0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2419200] :
      [1, 2, 5].flatMap(digit => Array.from({length: 15}, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
    return [
      {stroke, grid, ticks: none, font: FONT, size: 26, gap: 6, space: 64, incrs,
        label: data.axes.find(axis => axis.name === state.axis).title, labelFont: FONT, labelSize: 18, labelGap: 0,
        values: (plot, places, axis, space, step) => clock ? places.map(duration) : ticks(places, step)},
      {stroke, grid, ticks: none, font: FONT, gap: 6, space: 32, size: roomFor,
        values: (plot, places, axis, space, step) => plot.scales.y.distr === 3 ?
          places.map(place => place === null ? '' : short(place)) : ticks(places, step)},
    ];
  };

  const reference = chart => plot => {
    if (chart.reference === null) return;
    const y = Math.round(plot.valToPos(chart.reference, 'y', true)), {ctx, bbox} = plot;
    if (y < bbox.top || y > bbox.top + bbox.height) return;
    ctx.save();
    ctx.strokeStyle = colourOf('reference');
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  };

  // Where generations begin: the ranks of the run have changed there.
  const generations = plot => {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.strokeStyle = colourOf('reference');
    ctx.setLineDash([2, 3]);
    for (const place of data.marks[state.axis] || []) {
      const x = Math.round(plot.valToPos(place, 'x', true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  // The words about a place: its step, its documents and its time, as far as a line has a point there.
  const placeOf = (chart, x) => {
    const [table] = data.places[chart.lines[0].at], columns = data.tables[table], places = columns[state.axis];
    let best = null;
    places.forEach((place, row) => {
      if (place !== null && (best === null || Math.abs(place - x) < Math.abs(places[best] - x))) best = row;
    });
    const one = name => name === 'clock' ? duration(columns.clock[best]) : short(columns[name][best], 9);
    const words = {step: () => 'step ' + one('step'), documents: () => one('documents') + ' documents', clock: () => one('clock')};
    const several = new Set(chart.lines.map(line => data.places[line.at][0])).size > 1;
    return data.axes.map(axis => axis.name).filter(name => columns[name][best] !== null && (!several || name === state.axis))
      .sort((a, b) => (b === 'step') - (a === 'step')).map(name => words[name]()).join(' \u00b7 ');
  };

  const legendOf = (figure, chart, layers, note, rebuild) => {
    const box = make('div', 'legend readings', null), entries = [];
    const where = make('span', 'where', box);
    chart.lines.forEach((line, number) => {
      const key = chart.title + '\n' + line.name;
      const entry = button('', box, () => {
        if (!state.hidden.delete(key)) state.hidden.add(key);
        rebuild();
      });
      entry.setAttribute('aria-pressed', !state.hidden.has(key));
      entry.title = line.below !== null ? line.name + ' lies below ' + line.below + ': the two are the same here' : 'show or hide';
      const style = line.dashed || overlying(chart, line) ? chart.stacked ? ' pale' : ' dashed' : '';
      make('i', (chart.stacked ? 'square' : 'swatch') + ' colour-' + line.colour + style, entry);
      make('span', '', entry, line.below !== null ? line.name + ' (= ' + line.below + ')' : line.name);
      entries[number] = make('b', '', entry);
    });
    make('span', 'note', box, note);
    const show = (plot, rows) => {
      const idx = plot.cursor.idx, under = idx !== null && idx !== undefined && plot.cursor.left >= 0;
      where.textContent = under ? placeOf(chart, plot.data[0][idx]) : 'last';
      const values = {};
      layers.forEach(({number, kind}, layer) => {
        const row = rows[layer + 1];
        let at = under ? (plot.cursor.idxs || [])[layer + 1] : row.length - 1;
        if (!under) while (at > 0 && (row[at] === undefined || row[at] === null)) at--;
        const value = at === null || at === undefined ? undefined : row[at];
        values[number] = kind === 'mean' ? values[number] + ' (' + short(value, 3) + ')' : short(value);
      });
      entries.forEach((entry, number) => { entry.textContent = values[number]; });
    };
    return {box, show};
  };

  const build = figure => {
    const chart = data.charts[Number(figure.dataset.chart)], place = figure.querySelector('.plot');
    const positive = !chart.stacked && chart.lines.every(line => line.values.every(value => value === null || value >= 0)) &&
      chart.lines.some(line => line.values.some(value => value > 0));
    const chosen = state.logs.has(chart.title) ? state.logs.get(chart.title) : chart.log || state.log;
    const log = positive && chosen;
    if (drawn.has(figure)) drawn.get(figure).destroy();
    place.textContent = '';
    figure.querySelectorAll('.readings,.log').forEach(element => element.remove());
    const {layers, note} = layersOf(chart, log), rows = joined(layers);
    const hidden = number => state.hidden.has(chart.title + '\n' + layers[number].line.name);
    // The largest sum is drawn first, so that each area hides what reaches up behind it.
    const shown = chart.stacked ? stackedUp(rows, hidden) : rows;
    const order = layers.map((_, layer) => layer);
    if (chart.stacked) order.reverse();
    const legend = legendOf(figure, chart, order.map(layer => layers[layer]), note, () => build(figure));
    const read = [rows[0], ...order.map(layer => rows[layer + 1])];
    figure.append(legend.box);
    if (positive) {
      const toggle = button('log', figure.querySelector('figcaption'), () => {
        state.logs.set(chart.title, !log);
        build(figure);
      });
      toggle.className = 'log';
      toggle.title = 'logarithmic axis';
      toggle.setAttribute('aria-pressed', log);
    }
    const plot = new uPlot({
      width: Math.max(120, place.clientWidth), height: HEIGHT, padding: [8, 10, 0, 0], legend: {show: false},
      drawOrder: chart.stacked ? ['series', 'axes'] : ['axes', 'series'],
      scales: {x: {time: false, range: () => state.zoom || whole}, y: {distr: log ? 3 : 1, range: verticalRange(chart, log)}},
      axes: axesOf(chart),
      series: [{}, ...order.map(layer => seriesOf(layers[layer], chart))],
      cursor: {
        drag: {x: true, y: false, setScale: false}, y: false, sync: {key: 'charts', setSeries: false, scales: ['x', null]},
        points: {size: 7},
        bind: {dblclick: () => () => { zoom(null); return null; }},
      },
      hooks: {
        draw: [reference(chart), generations], setLegend: [plot => legend.show(plot, read)], setCursor: [plot => legend.show(plot, read)],
        setSelect: [plot => {
          if (plot.select.width < 4) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map(left => plot.posToVal(left, 'x'));
          plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          zoom(ends);
        }],
      },
    }, [shown[0], ...order.map(layer => shown[layer + 1])], place);
    withFinger(plot.over);
    plot.root.setAttribute('role', 'img');
    plot.root.setAttribute('aria-label', chart.title);
    legend.show(plot, read);
    drawn.set(figure, plot);
  };

  // Those that are in sight are drawn at once, the others when they come near.
  const near = figure => {
    const box = figure.getBoundingClientRect();
    return box.bottom > -400 && box.top < innerHeight + 400;
  };
  const drawAll = every => {
    for (const figure of document.querySelectorAll('figure.chart')) {
      if (every || near(figure)) build(figure);
      else if (drawn.has(figure)) {
        drawn.get(figure).destroy();
        drawn.delete(figure);
      }
      if (!drawn.has(figure)) seen.observe(figure);
      sized.observe(figure.querySelector('.plot'));
    }
  };

  const zoom = ends => {
    state.zoom = ends && ends[1] > ends[0] ? ends : null;
    document.documentElement.dataset.zoomed = state.zoom ? 'yes' : 'no';
    for (const plot of drawn.values()) plot.setScale('x', {min: (state.zoom || whole)[0], max: (state.zoom || whole)[1]});
  };

  const findWhole = () => {
    let low = Infinity, high = -Infinity;
    for (const table of data.tables) for (const place of table ? table[state.axis] : []) {
      if (place === null) continue;
      low = Math.min(low, place);
      high = Math.max(high, place);
    }
    whole = high > low ? [low, high] : low === Infinity ? [0, 1] : [low - 0.5, low + 0.5];
  };
  const setAxis = axis => {
    state.axis = axis;
    state.zoom = null;
    document.documentElement.dataset.axis = axis;
    findWhole();
    zoom(null);
    drawAll(false);
    switches();
  };

  const switches = () => {
    const place = document.querySelector('.switches');
    if (!place) return;
    place.textContent = '';
    const group = (title, options, chosen, choose) => {
      const label = make('label', '', place, title + ' '), select = make('select', '', label);
      for (const [value, text] of options) make('option', '', select, text).value = value;
      select.value = String(chosen);
      select.addEventListener('change', () => choose(select.value));
    };
    if (data.axes.length > 1)
      group('Over', data.axes.map(axis => [axis.name, axis.button.toLowerCase()]), state.axis, setAxis);
    group('Smoothing', WIDEST.map(share => [share, share ? '\u00b1' + 100 * share + ' %' : 'none']), state.smoothing, value => {
      state.smoothing = Number(value);
      drawAll(false);
    });
    const log = button('Log scale', place, () => {
      state.log = !state.log;
      state.logs.clear();
      log.setAttribute('aria-pressed', state.log);
      drawAll(false);
    });
    log.setAttribute('aria-pressed', state.log);
    const back = button('Whole run', place, () => zoom(null));
    back.className = 'back';
    make('span', 'hint', place, 'Drag to zoom');
  };

  const start = async () => {
    try {
      data = await unpack(document.querySelector('[data-part=charts]'));
    } catch (error) {
      document.querySelectorAll('.plot').forEach(place => { place.textContent = 'This browser cannot read the numbers: ' + error; });
      return;
    }
    if (!data.axes.length) return;
    state.axis = data.axes[0].name;
    document.documentElement.dataset.axis = state.axis;
    findWhole();
    seen = new IntersectionObserver(entries => entries.forEach(({target, isIntersecting}) => {
      if (!isIntersecting) return;
      seen.unobserve(target);
      if (!drawn.has(target)) build(target);
    }), {rootMargin: '400px'});
    sized = new ResizeObserver(entries => entries.forEach(({target}) => {
      const plot = drawn.get(target.closest('figure'));
      if (plot && Math.abs(plot.width - target.clientWidth) > 1 && target.clientWidth > 0)
        plot.setSize({width: target.clientWidth, height: HEIGHT});
    }));
    switches();
    drawAll(false);
    document.documentElement.dataset.charts = 'drawn';
  };

  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => data && drawAll(false));
  addEventListener('beforeprint', () => data && drawAll(true));
  start();
})();
