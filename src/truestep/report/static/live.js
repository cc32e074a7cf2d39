// A page that is served asks its server whether there is news, and takes over what has changed without losing its place.
(() => {
  const mark = document.querySelector('meta[name=truestep-live]');
  if (!mark) return;
  const SECONDS = 2;
  let version = mark.content, waiting = null;
  const state = make('p', 'live', null, 'live');
  state.setAttribute('role', 'status');
  const place = () => document.querySelector('header').append(state);
  place();

  const openParts = () => [...document.querySelectorAll('details[open] > summary')].map(summary => summary.textContent);
  const takeOver = page => {
    const main = document.querySelector('main'), fresh = page.querySelector('main');
    const scroll = [scrollX, scrollY], open = new Set(openParts());
    // The rollouts stay as they are, with what is open and filtered, until newer ones are asked for.
    const [ours, theirs] = [main.querySelector('.rollouts'), fresh.querySelector('.rollouts')];
    if (ours && theirs) {
      const text = root => root.querySelector('[data-part=index]').textContent;
      if (text(ours) !== text(theirs)) waiting = theirs;
      if (waiting) offer(ours);
      const there = theirs.nextElementSibling;
      if (there && there.classList.contains('absent')) there.remove();
      theirs.replaceWith(ours);
    }
    const height = main.offsetHeight;
    main.style.minHeight = height + 'px';
    main.replaceChildren(...fresh.childNodes);
    document.title = page.title;
    for (const summary of main.querySelectorAll('details > summary'))
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    place();
    scrollTo(...scroll);
    if (!ours && theirs) Rollouts.start();
    Charts.start().then(() => { main.style.minHeight = ''; });
  };
  const offer = ours => {
    const known = ours.querySelector('.newer');
    if (known) return;
    const ask = button('show newer rollouts', null, () => {
      ours.replaceWith(waiting);
      waiting = null;
      Rollouts.start();
    });
    ask.className = 'newer';
    ours.prepend(ask);
  };

  const look = async () => {
    try {
      const answer = await fetch('version', {cache: 'no-store'});
      if (!answer.ok) throw new Error(answer.status);
      const now = (await answer.text()).trim();
      if (now !== version) {
        const page = await (await fetch('./', {cache: 'no-store'})).text();
        takeOver(new DOMParser().parseFromString(page, 'text/html'));
        version = now;
      }
      state.textContent = 'live';
      state.classList.remove('lost');
    } catch (error) {
      state.textContent = 'no longer live: the server does not answer';
      state.classList.add('lost');
    }
    setTimeout(look, 1000 * SECONDS);
  };
  setTimeout(look, 1000 * SECONDS);
})();
