/* Draw the page, then register the event handlers. */
function heading() {
  const what = { model: "model report", package: "package report", diff: "comparison", watched: "watched passes" }[facts.kind];
  add(document.getElementById("title"), [facts.title, h("small", {}, what)]);
}

function keys(event) {
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && event.target.id === "search") { event.target.value = ""; search(""); event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const acts = {
    "/": () => document.getElementById("search").focus(),
    j: () => rows.length && step(1),
    k: () => rows.length && step(-1),
    t: nextTheme,
    "?": () => document.getElementById("help").showModal(),
  };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

function watchSections() {
  const update = () => {
    let current = sections[0];
    for (const each of sections) if (each.made.getBoundingClientRect().top < 160) current = each;
    for (const each of sections) { if (each === current) each.link.setAttribute("aria-current", "true"); else each.link.removeAttribute("aria-current"); }
  };
  addEventListener("scroll", update, { passive: true });
  update();
}

function start() {
  heading();
  const place = location.hash.slice(1);
  let kept = "system";
  try { kept = localStorage.getItem("inlay-theme") || kept; } catch (error) { /* no storage in private windows */ }
  theme(kept);
  const asked = new URLSearchParams(place.includes("=") ? place : "");
  if (facts.kind === "diff") comparison();
  else if (facts.kind === "watched") watched();
  else { overview(); timeline(); programs(); candidates(); bindings(); plan(); lanes(); memory(); drift(); configuration(); }
  if (rows.length) {
    const wanted = facts.transforms.findIndex((each) => each.key === asked.get("transform"));
    const first = facts.transforms.findIndex((each) => each.diff);
    choose(wanted >= 0 ? wanted : Math.max(0, first));
  }
  const field = document.getElementById("search");
  let waiting = 0;
  field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => search(field.value), 80); });
  if (asked.get("find")) { field.value = asked.get("find"); search(field.value); }
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
  document.addEventListener("keydown", keys);
  watchSections();
  const wanted = sections.find((each) => each.id === place);
  if (wanted) wanted.made.scrollIntoView({ behavior: "instant" });
  document.documentElement.dataset.ready = Math.round(performance.now());
}
start();
