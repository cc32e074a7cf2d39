// What all scripts of the page share.
document.documentElement.classList.add('js');

const make = (tag, className, parent, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};
const button = (text, parent, action) => {
  const element = make('button', '', parent, text);
  element.type = 'button';
  element.addEventListener('click', action);
  return element;
};

// Read a part of the page that is packed as compressed JSON.
const unpack = async element => {
  const letters = atob(element.textContent);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text());
};

// A mark that turns the direction of text around is shown as its number where it would reach beyond its own place.
const plain = text => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, mark => '\\u' + mark.charCodeAt(0).toString(16));

const minus = text => text.replace('-', '\u2212').replace('e-', 'e\u2212').replace('e+', 'e');
const short = (value, digits = 4) => {
  if (value === null || value === undefined || Number.isNaN(value)) return '\u2013';
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e9)) return minus(value.toExponential(Math.max(1, digits - 2)));
  const rounded = Number(value.toPrecision(Math.max(digits, size >= 1 ? Math.floor(Math.log10(size)) + 1 : 0)));
  return minus(rounded.toLocaleString('en-US', {maximumFractionDigits: 12}));
};
const duration = seconds => {
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (seconds < 10 && whole !== seconds) return seconds.toFixed(1) + ' s';
  if (minutes === 0) return whole + ' s';
  if (hours === 0) return minutes + ' min' + (whole % 60 ? ' ' + whole % 60 + ' s' : '');
  if (hours < 48) return hours + ' h' + (minutes % 60 ? ' ' + minutes % 60 + ' min' : '');
  return Math.floor(hours / 24) + ' d' + (hours % 24 ? ' ' + hours % 24 + ' h' : '');
};
const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

// The labels of an axis whose ticks are so far apart.
const ticks = (values, step) => {
  const largest = Math.max(0, ...values.map(Math.abs));
  if (largest >= 1e15 || (largest && largest < 1e-3))
    return values.map(value => value === 0 ? '0' : minus(Number(value.toPrecision(3)).toExponential()));
  const [unit, letter] = largest >= 1e12 ? [1e12, 'T'] : largest >= 1e9 ? [1e9, 'B'] : largest >= 1e6 ? [1e6, 'M'] :
    largest >= 1e4 ? [1e3, 'k'] : [1, ''];
  let decimals = 0;
  for (let size = step / unit; decimals < 12 && Math.abs(size - Math.round(size)) > 1e-6 * size; size *= 10) decimals++;
  return values.map(value => Math.abs(value) < step / 2 ? '0' : minus((value / unit).toFixed(decimals)) + letter);
};
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const roomFor = (chart, values) => Math.max(36, 14 + 6.4 * Math.max(0, ...(values || []).map(text => String(text || '').length)));

// uPlot knows the mouse; a finger that moves sideways does the same, and one that moves up or down scrolls the page.
const withFinger = over => {
  over.style.touchAction = 'pan-y';
  const pass = (name, kind, target) => over.addEventListener(name, event => {
    if (event.pointerType !== 'touch') return;
    target().dispatchEvent(new MouseEvent(kind, {bubbles: true, button: 0, clientX: event.clientX, clientY: event.clientY,
      movementX: 1, movementY: 1}));
  });
  pass('pointerdown', 'mousemove', () => over);
  pass('pointerdown', 'mousedown', () => over);
  pass('pointermove', 'mousemove', () => over);
  pass('pointerup', 'mouseup', () => document);
};
