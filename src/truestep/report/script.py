"""The script of the page: the switch of the axis, and the read-out under the pointer."""

PAGE_SCRIPT = """
(() => {
  const root = document.documentElement;
  root.classList.add('js');
  const buttons = [...document.querySelectorAll('button[data-set]')];
  const setAxis = axis => {
    root.dataset.axis = axis;
    buttons.forEach(button => button.setAttribute('aria-pressed', button.dataset.set === axis));
  };
  buttons.forEach(button => button.addEventListener('click', () => setAxis(button.dataset.set)));

  const whole = new Intl.NumberFormat('en-US', {maximumSignificantDigits: 6});
  const format = value => {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(3).replace('-', '\\u2212').replace('e+', 'e');
    return size >= 1e6 ? Math.round(value).toLocaleString('en-US') : whole.format(value).replace('-', '\\u2212');
  };
  const make = (tag, className, parent, text) => {
    const element = document.createElement(tag);
    element.className = className;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  // The point nearest to x among those that have a value; points are in the order of their steps.
  const nearest = (points, column, x) => {
    let best = null;
    for (const point of points) {
      if (point[column] === null || point[2] === null) continue;
      if (best === null || Math.abs(point[column] - x) < Math.abs(best[column] - x)) best = point;
    }
    return best;
  };

  document.querySelectorAll('figure.chart').forEach(figure => {
    let series = null;
    figure.querySelectorAll('.variant').forEach(variant => {
      const plot = variant.querySelector('.plot');
      const column = variant.dataset.axis === 'step' ? 0 : 1;
      const [x0, x1, y0, y1] = ['x0', 'x1', 'y0', 'y1'].map(name => Number(variant.dataset[name]));
      const height = value => {
        if (!('log' in variant.dataset)) return 1 - (value / 2 - y0 / 2) / (y1 / 2 - y0 / 2);
        return 1 - Math.log(Math.max(value, y0) / y0) / Math.log(y1 / y0);
      };
      const clear = () => plot.querySelectorAll('.cross,.spot,.tip').forEach(element => element.remove());
      const show = event => {
        series = series || JSON.parse(figure.querySelector('script').textContent);
        const box = plot.getBoundingClientRect();
        const x = x0 + (event.clientX - box.left) / box.width * (x1 - x0);
        const found = series.map(line => [line, nearest(line.points, column, x)]).filter(pair => pair[1])
          // A run that ended long before, or starts long after, has nothing to say here.
          .filter(([line, point]) => Math.abs(point[column] - x) <= .03 * (x1 - x0) ||
            line.points.some(other => other[column] !== null && (other[column] > x) !== (point[column] > x)));
        clear();
        if (!found.length) return;
        const place = found.map(pair => pair[1][column])
          .reduce((best, value) => Math.abs(value - x) < Math.abs(best - x) ? value : best);
        const left = value => (value - x0) / (x1 - x0);
        make('div', 'cross', plot).style.left = 100 * left(place) + '%';
        const tip = make('div', 'tip', plot);
        for (const [line, point] of found) {
          const spot = make('i', 'spot colour-' + line.colour, plot);
          spot.style.left = 100 * left(point[column]) + '%';
          spot.style.top = 100 * height(point[2]) + '%';
          const row = make('div', '', tip);
          const name = make('span', '', row);
          make('i', 'swatch colour-' + line.colour, name);
          // Runs have points at places of their own: say which one a value is from where it is another.
          const other = point[column] !== place ? ' @ ' + format(point[column]) : '';
          name.append(line.name + other);
          make('b', '', row, format(point[2]));
        }
        const point = found.map(pair => pair[1]).find(candidate => candidate[column] === place);
        const head = make('div', '', tip);
        const documents = point[1] === null ? '' : ' \\u00b7 ' + format(point[1]) + ' documents';
        make('span', '', head, 'step ' + format(point[0]) + documents);
        tip.prepend(head);
        const offset = left(place) * box.width;
        const room = offset + 14 + tip.offsetWidth > box.width + 12;
        tip.style.left = Math.max(-44, room ? offset - tip.offsetWidth - 14 : offset + 14) + 'px';
      };
      plot.addEventListener('pointermove', show);
      plot.addEventListener('pointerdown', show);
      plot.addEventListener('pointerleave', clear);
    });
  });
})();
"""
