"use strict";
// Charts, colours of tokens, keys, and live updates. Everything else is HTML from the server. In an exported
// file, charts read EXPORTED (a script element of JSON) instead of the server, and links are fragments.
(() => {
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const EXPORTED = () => $("#exported") && (EXPORTED.data ??= JSON.parse($("#exported").textContent));
const POLL = 2000, SERIES = 8, EVALUATED = "eval/";

// --- theme ---------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* a file may have no storage */ }
  for (const button of $$('[data-do="theme"]')) button.textContent = `Theme: ${name}`;
  charts.forEach(section => section.draw());
}
function ink(name) {
  const probe = document.body.appendChild(make("i"));
  probe.style.color = `var(--${name})`;
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

// --- figures -------------------------------------------------------------------------------------------------

// Four significant digits, and all digits before the point.
const FOUR = new Intl.NumberFormat("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4, maximumFractionDigits: 0, roundingPriority: "morePrecision" });
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e9)) return value.toLocaleString("en");
  return size >= 1e9 || size < 1e-3 ? value.toExponential(3).replace("e+", "e") : FOUR.format(value);
}
const tick = value => value === null ? "" : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3)
  ? value.toExponential(1).replace(/\.0(?=e)/, "").replace("e+", "e") : String(+value.toPrecision(6));
const WHOLE = [...Array(10).keys()].flatMap(n => [1, 2, 5].map(digit => digit * 10 ** n));  // steps, and seconds
const pad = value => String(Math.floor(value)).padStart(2, "0");
const clock = s => `${Math.floor(s / 3600)}:${pad(s % 3600 / 60)}:${pad(s % 60)}`;

// --- charts --------------------------------------------------------------------------------------------------

const charts = [];
class Charts {
  constructor(root) {
    this.root = root;
    this.runs = JSON.parse(root.dataset.runs);
    this.x = "step";
    this.zoom = null;
    this.tags = {};
    this.seen = {};  // metric -> run -> series
    this.figures = $$(".chart", root);
    this.smooth = $("[name=smooth]", root);
    this.smooth.onchange = () => this.load(true);
    this.smooth.disabled = Boolean(EXPORTED());
    for (const button of $$("[data-x]", root)) button.onclick = () => this.axis(button.dataset.x);
    $("[data-log]", root).onchange = () => this.draw();
    $('[data-do="reset"]', root).onclick = () => this.range(null);
    $("[data-find]", root).oninput = event => this.find(event.target.value.toLowerCase());
    for (const each of $$("details", root)) each.ontoggle = () => this.load(true);
    new ResizeObserver(() => this.draw()).observe(root);
    this.load(true);
  }
  shown() { return this.figures.filter(each => each.checkVisibility()); }
  axis(x) {
    this.x = x;
    for (const each of $$("[data-x]", this.root)) each.setAttribute("aria-pressed", each.dataset.x === x);
    this.range(null);
  }
  range(zoom) {
    this.zoom = zoom;
    $('[data-do="reset"]', this.root).hidden = !zoom;
    if (zoom) this.draw();  // with the points that are there; those between them come
    this.load(true);
  }
  find(word) {
    for (const each of $$("details .chart", this.root)) each.hidden = !each.dataset.metric.toLowerCase().includes(word);
    for (const group of $$("details", this.root)) group.open = word && $$(".chart:not([hidden])", group).length <= 12;
    this.load(true);
  }
  async load(always) {
    const names = [...new Set(this.shown().map(each => each.dataset.metric))];
    if (!names.length) return;
    const asked = this.asked = {};
    let changed = always;
    await Promise.all(this.runs.map(async run => {
      const { data, tag } = EXPORTED() ? { data: EXPORTED().curves[run][this.x] }
        : await this.fetch(run, names, this.x, this.zoom, always || this.tags[run]);
      if (!data || this.asked !== asked) return;
      this.tags[run] = tag;  // of what is drawn: an answer that came too late is asked for again
      changed = true;
      for (const name of names) {
        const series = (this.seen[name] ??= {})[run] = data.series[name];
        if (series && name.startsWith(EVALUATED)) series.smooth = undefined;  // few, and far apart
      }
    }));
    if (changed && this.asked === asked) this.draw();
  }
  async fetch(run, names, x, range, had) {
    const query = new URLSearchParams({ names: names.join(","), x, smooth: this.smooth.value });
    if (range) { query.set("from", range[0]); query.set("to", range[1]); }
    const answer = await ask(`/run/${encodeURIComponent(run)}/curves.json?${query}`);
    const tag = answer?.headers.get("etag");
    return answer?.ok && tag !== had ? { data: await answer.json(), tag } : {};
  }
  draw() {
    this.ink = ink("dim");
    for (const each of this.shown()) this.one(each);
    this.read(null);
  }
  one(figure) {
    const seen = this.seen[figure.dataset.metric], box = $(".plot", figure), log = $("[data-log]", this.root).checked;
    if (!seen) return;
    const there = this.runs.map((run, n) => ({ n, ...seen[run] })).filter(each => each.x?.length);
    const tables = there.map(each => [each.x, each.y, ...(each.smooth ? [each.smooth] : [])]);
    const lost = there.flatMap(each => each.not_finite), more = lost.length > 5 ? ` and ${lost.length - 5} more` : "";
    $(".lost", figure).textContent = lost.length ? `NaN or infinite at step ${lost.slice(0, 5).join(", ")}${more}` : "";
    box.classList.toggle("empty", !there.length);
    figure.series = there;
    const key = [this.x, log, this.ink, box.clientWidth, ...there.map(each => [each.n, !each.smooth])].join();
    const data = there.length ? uPlot.join(tables) : [[]];
    if (figure.key === key) {
      figure.chart?.setData(data, false);
    } else {
      figure.chart?.destroy();
      figure.chart = there.length ? this.plot(figure, there, data, log) : null;
      figure.key = key;
    }
    const [from, to] = this.zoom ?? [data[0][0], data[0].at(-1)];
    figure.chart?.setScale("x", { min: from, max: to > from ? to : from + 1 });
  }
  plot(figure, there, data, log) {
    const box = $(".plot", figure), grid = { stroke: ink("line"), width: 1 };
    const spaced = { stroke: this.ink, font: "11px system-ui", ticks: { show: false }, grid, gap: 4 };
    const lines = there.flatMap(each => {
      const line = { stroke: ink(`s${each.n % SERIES}`), width: 1.5, points: { show: false }, spanGaps: true };
      const raw = { ...line, points: { show: each.x.length <= 40, size: 4 } };
      return each.smooth ? [{ ...raw, alpha: .3, width: 1 }, line] : [raw];
    });
    const options = {
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, series: [{}, ...lines], padding: [6, 6, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => around(low, high) } },
      axes: [
        { ...spaced, size: 20, space: 60, incrs: WHOLE, values: (_, all) => all.map(this.x === "time" ? clock : tick) },
        { ...spaced, size: 46, space: 30, values: (_, all) => all.map(tick) },
      ],
      cursor: {
        y: false, sync: { key: "lockstep", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 },
        bind: { dblclick: () => () => { this.range(null); return null; } },
      },
      hooks: {
        setCursor: [u => this.read(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
        setSelect: [u => {
          if (u.select.width < 4) return;
          const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.range(range);
        }],
      },
    };
    const chart = new uPlot(options, data, box);
    let down = 0;
    chart.over.addEventListener("mousedown", event => { down = event.clientX; });
    chart.over.addEventListener("click", event => Math.abs(event.clientX - down) < 4 && this.open());
    return chart;
  }
  open() {
    const one = this.runs.length === 1 && !EXPORTED() && this.step !== null;
    if (one && matchMedia("(hover: hover)").matches) location.assign(`/run/${encodeURIComponent(this.runs[0])}/step/${this.step}`);
  }
  // The values of the step under the cursor, in every chart; of the last step where there is none.
  read(at) {
    if (this.at === at && at !== null) return;
    this.at = at;
    let step = null, when = null;
    for (const figure of this.shown()) {
      const parts = [];
      for (const each of figure.series ?? []) {
        const i = at === null ? each.x.length - 1 : nearest(each.x, at);
        parts.push({ run: each.n, value: each.y[i], smooth: each.smooth?.[i] });
        if (!figure.dataset.metric.startsWith(EVALUATED)) [step, when] = [each.step[i], each.x[i]];
      }
      show(figure, parts, this.runs.length > 1);
    }
    const line = $(".at", this.root);
    line.replaceChildren();
    this.step = step;
    if (step === null || (at === null && this.runs.length > 1)) return;
    const told = `${at === null ? "last " : ""}step ${step.toLocaleString("en")}`;
    line.append(make("b", { textContent: told }), this.x === "time" ? ` at ${clock(when)}` : "");
    clearTimeout(this.timer);
    const thinned = this.shown().some(each => each.series?.some(one => !one.raw));
    if (at !== null && thinned && this.runs.length === 1 && !EXPORTED()) this.timer = setTimeout(() => this.exact(step, at), 80);
  }
  // A thinned curve need not have the very step under the cursor: ask for the values of it.
  async exact(step, at) {
    const figures = this.shown(), names = figures.map(each => each.dataset.metric);
    const { data } = await this.fetch(this.runs[0], names, "step", [step, step]);
    if (!data || this.at !== at) return;
    for (const figure of figures) {
      const one = data.series[figure.dataset.metric];
      if (one?.x.length || one?.not_finite.includes(step)) show(figure, [{ run: 0, value: one.y[0], smooth: one.smooth?.[0] }], false);
    }
  }
}
function around(low, high) {
  if (low === null || high === null) return [0, 1];
  // What differs by rounding alone is one value.
  const margin = high - low > Math.abs(high) * 1e-9 ? (high - low) * .06 : Math.abs(high) * .1 || 1;
  return [low - margin, high + margin];
}
const nearest = (xs, value) => xs.reduce((best, x, i) => Math.abs(x - value) < Math.abs(xs[best] - value) ? i : best, 0);
function show(box, parts, several) {
  $(".read", box).replaceChildren(...parts.flatMap(({ run, value, smooth }) => [
    make("b", { textContent: figure(value), className: several ? `s${run % SERIES}` : "" }),
    ...(several || smooth === undefined ? [] : [make("i", { textContent: figure(smooth), title: "smoothed" })]),
  ]));
}

// --- tokens --------------------------------------------------------------------------------------------------

const FIELDS = ["token", "logprob", "gap", "entropy", "advantage"];
const token = element => Object.fromEntries(element.dataset.t.split(",").map((text, i) => [FIELDS[i], text === "" ? null : +text]));
const PAINTS = {
  // kind: [share of full colour from -1 to 1, ends of the scale]
  logprob: { share: t => Math.min(1, -t.logprob / 6), ends: () => ["0", "≤ −6 nats"], above: "s1" },
  gap: { share: (t, most) => Math.sign(t.gap) * Math.sqrt(Math.abs(t.gap) / most), ends: most => [`−${figure(most)}`, `+${figure(most)} nats`], above: "s0", below: "bad" },
  entropy: { share: (t, most) => t.entropy / most, ends: most => ["0", `${figure(most)} nats`], above: "s3" },
  advantage: { share: (t, most) => t.advantage / most, ends: most => [`−${figure(most)}`, `+${figure(most)}`], above: "good", below: "bad" },
};
function paint(name) {
  const all = $$(".tokens i").map(element => [element, token(element)]);
  for (const button of $$("[data-paint]")) button.setAttribute("aria-pressed", button.dataset.paint === name);
  paint.now = name;
  const kind = PAINTS[name];
  const most = kind ? all.reduce((most, [, t]) => Math.max(most, Math.abs(t[name] ?? 0)), 0) || 1 : 1;
  const shade = share => `color-mix(in srgb, var(--${share < 0 ? kind.below : kind.above}) ${Math.round(Math.abs(share) * 60)}%, transparent)`;
  for (const [element, t] of all) {
    const share = kind && t[name] !== null ? kind.share(t, most) : 0;
    element.style.background = Math.abs(share) < .02 ? "" : shade(share);
  }
  for (const scale of $$(".scale")) {
    const band = make("i"), [low, high] = kind?.ends(most) ?? [];
    scale.replaceChildren(...(kind ? [low, band, high] : []));
    if (kind) band.style.background = `linear-gradient(to right, ${kind.below ? shade(-1) : "transparent"}, transparent ${kind.below ? 50 : 0}%, ${shade(1)})`;
  }
}
function tip(event) {
  const element = event.target.closest?.(".tokens i"), box = $(".tip");
  box.hidden = !element;
  if (!element) return;
  const t = token(element);
  const values = { ...t, probability: t.logprob === null ? null : Math.exp(t.logprob) };
  const rows = Object.entries(values).filter(([, value]) => value !== null);
  box.textContent = rows.map(([name, value]) => name.padEnd(12) + (name === "token" ? value : figure(value))).join("\n");
  const at = element.getBoundingClientRect(), size = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 4))}px`;
  box.style.top = `${at.bottom + size.height + 6 > innerHeight ? at.top - size.height - 4 : at.bottom + 4}px`;
}

// --- live ----------------------------------------------------------------------------------------------------

const gone = text => Object.assign($(".gone"), { hidden: !text, textContent: text });
async function ask(url) {
  try {
    const answer = await fetch(url, { cache: "no-cache" });
    gone(answer.status === 401 ? "The server has a new token: open the URL that it printed." : "");
    return answer.status === 401 ? null : answer;
  } catch {
    gone("The server does not answer: this page is no longer live.");
    return null;
  }
}
async function refresh() {
  const answer = await ask(location.href);
  const tag = answer?.headers.get("etag");
  if (!answer || tag === refresh.tag) return;
  refresh.tag = tag;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = fresh.title;
  for (const old of $$("[data-live]")) {
    const now = fresh.getElementById(old.id);
    if (!now || now.outerHTML === (old.html ?? old.outerHTML) || !getSelection().isCollapsed) continue;
    const ticked = $$(":checked", old).map(each => each.value), row = $(".cur a.row", old)?.href;
    const copy = document.adoptNode(now);
    copy.html = copy.outerHTML;
    old.replaceWith(copy);
    for (const each of $$("input", copy)) each.checked = ticked.includes(each.value);
    if (row) $$("a.row", copy).find(each => each.href === row)?.closest("[data-row]").classList.add("cur");
  }
}
async function live() {
  if (!document.hidden) await Promise.all([refresh(), ...charts.map(section => section.load(false))]);
  setTimeout(live, POLL);
}

// --- keys ----------------------------------------------------------------------------------------------------

function move(by) {
  const rows = $$("[data-row]").filter(each => each.checkVisibility());
  const next = rows[Math.max(0, Math.min(rows.length - 1, rows.findIndex(each => each.classList.contains("cur")) + by))];
  for (const each of rows) each.classList.toggle("cur", each === next);
  $("a.row", next ?? document)?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "nearest" });
}
const follow = selector => $$(selector).find(each => each.checkVisibility())?.click();
const DO = {
  theme: () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]),
  help: () => $("dialog.keys").showModal(),
};
const KEYS = {
  j: () => move(1), k: () => move(-1), t: DO.theme, "?": DO.help, u: () => follow(".mark"),
  ArrowLeft: () => follow('a[rel="prev"]'), ArrowRight: () => follow('a[rel="next"]'),
  "/": () => $$("[data-search]").find(each => each.checkVisibility())?.focus(),
  c: () => follow(`[data-paint="${paint.now}"] ~ button:not(:disabled)`) ?? follow("[data-paint]"),
  Escape: () => charts.forEach(section => section.zoom && section.range(null)),
  ...Object.fromEntries([1, 2, 3, 4].map(n => [n, () => follow(`.tabs a:nth-child(${n})`)])),
};
function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
}

// --- start ---------------------------------------------------------------------------------------------------

// Of an exported file, the section that the fragment names is shown.
function route() {
  const pages = $$("body > section[data-page]"), path = decodeURI(location.hash.slice(1)) || pages[0].dataset.page;
  const page = pages.find(each => decodeURI(each.dataset.page) === path) ?? pages[0];
  for (const each of pages) each.hidden = each !== page;
  document.title = `${page.dataset.title} · Lockstep`;
  scrollTo(0, 0);
  start(page);
}
function start(root) {
  for (const section of $$(".charts:not([data-on])", root)) { section.dataset.on = ""; charts.push(new Charts(section)); }
  if ($(".tokens", root)) paint(paint.now ?? "logprob");
}
let saved = null;
try { saved = localStorage.getItem("theme"); } catch { /* see theme() */ }
document.documentElement.dataset.theme = THEMES.includes(saved) ? saved : "auto";
addEventListener("DOMContentLoaded", () => {
  theme(document.documentElement.dataset.theme);
  document.addEventListener("keydown", key);
  document.addEventListener("mouseover", tip);
  document.addEventListener("click", event => {
    const button = event.target.closest("[data-do], [data-paint]");
    if (button?.dataset.paint) paint(button.dataset.paint);
    else if (button) DO[button.dataset.do]?.();
  });
  matchMedia("(prefers-color-scheme: dark)").onchange = () => charts.forEach(section => section.draw());
  if (EXPORTED()) { addEventListener("hashchange", route); route(); } else { start(document); setTimeout(live, POLL); }
});
window.lockstep = { charts, paint, theme };
})();
