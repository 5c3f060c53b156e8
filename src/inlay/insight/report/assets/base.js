const facts = JSON.parse(document.getElementById("facts").textContent);
const state = { query: "", transform: 0, whole: false, types: innerWidth > 700, opened: new Set() };
const KINDS = ["same", "changed", "removed", "added"];

/* Create an element. Strings become text nodes, so that model text is never parsed as markup. */
function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (name === "style") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else made.setAttribute(name, value === true ? "" : value);
  }
  add(made, children);
  return made;
}
function add(to, children) {
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== "") to.append(child);
  return to;
}

function bytes(count) {
  if (count === null || count === undefined) return "";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return `${Math.round(count)} B`;
}
function seconds(value) {
  if (value === null || value === undefined) return "";
  return value >= 1 ? `${value.toFixed(1)} s` : `${Math.max(0, Math.round(value * 1000))} ms`;
}
const number = (value) => (value === null || value === undefined ? "" : Number(value).toLocaleString("en"));
const small = (value) => (value === null ? "not finite" : value ? Number(value).toExponential(1) : "0");
const plural = (count, one, many) => `${number(count)} ${count === 1 ? one : many || one + "s"}`;
const times = (count) => (count > 1 ? ` × ${number(count)}` : "");
const code = (text) => h("span", { class: "code" }, text);
/* Text between backticks is code. */
const said = (text) => text.split("`").map((part, at) => (at % 2 ? code(part) : part));
const why = (text) => (text ? h("p", { class: "why" }, said(text)) : null);
const tag = (text, kind) => h("span", { class: `tag ${kind || ""}` }, text);

/* A table in a scrolling box. Columns that start with # are numeric. */
function table(label, columns, rows) {
  const numeric = columns.map((name) => name.startsWith("#"));
  const head = h("tr", {}, columns.map((name, at) => h("th", { scope: "col", class: numeric[at] ? "num" : null }, name.replace(/^#/, ""))));
  const body = rows.map((row) =>
    h("tr", { "data-find": true, class: row.differs ? "differs" : null },
      (row.cells || row).map((cell, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: numeric[at] ? "num" : null }, cell))));
  return h("div", { class: "box", tabindex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

const sections = [];
function section(id, title, ...children) {
  const made = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title));
  add(made, children);
  const hits = h("span", { class: "hits", hidden: true });
  const link = h("a", { href: `#${id}` }, title, hits);
  document.getElementById("sections").append(link);
  document.getElementById("content").append(made);
  sections.push({ id, made, link, hits });
  return made;
}

/* Search: hide items without the words, and show the number of matches of each section. */
const finders = [];
const words = () => state.query.toLowerCase().split(/\s+/).filter(Boolean);
const holds = (text, wanted) => wanted.every((word) => text.includes(word));
const remembered = new WeakMap();
function textOf(element) {
  if (!remembered.has(element)) remembered.set(element, element.textContent.toLowerCase());
  return remembered.get(element);
}
function search(text) {
  state.query = text.trim();
  const wanted = words();
  let total = 0;
  for (const { id, made, hits } of sections) {
    let found = 0;
    for (const each of made.querySelectorAll("[data-find]")) {
      if (each.parentElement.closest("[data-find], #detail")) continue;
      const match = holds(each.dataset.more ? each.dataset.more + textOf(each) : textOf(each), wanted);
      each.hidden = !match;
      found += match;
    }
    for (const finder of finders) if (finder.section === id) found += finder.find(wanted);
    total += found;
    hits.hidden = !wanted.length;
    hits.textContent = number(found);
  }
  const status = document.getElementById("found");
  status.hidden = !wanted.length;
  status.textContent = total ? `${plural(total, "match", "matches")} for “${state.query}”.` : `No matches for “${state.query}”.`;
  remember();
}

/* The URL stores the search and the transform, so that it can be shared: #find=…&transform=… */
function remember() {
  const parts = new URLSearchParams();
  if (state.query) parts.set("find", state.query);
  if (state.transform && facts.transforms) parts.set("transform", facts.transforms[state.transform].key);
  const text = parts.toString();
  try { history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]); } catch (error) { /* not allowed for some local files */ }
}

const THEMES = ["system", "light", "dark"];
function theme(name) {
  const chosen = THEMES.includes(name) ? name : "system";
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  const button = document.getElementById("theme");
  button.textContent = `Theme: ${chosen}`;
  button.dataset.theme = chosen;
  try { localStorage.setItem("inlay-theme", chosen); } catch (error) { /* no storage in private windows */ }
}
function nextTheme() {
  const now = document.getElementById("theme").dataset.theme;
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}
