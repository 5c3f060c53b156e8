/* The timeline, and the details of one transform. */
const STAGES = ["clean", "canonicalize", "shard", "weights", "fuse", "state", "schedule", "lower"];
const colour = (stage) => `var(--c${(Math.max(0, STAGES.indexOf(stage)) % 8) + 1})`;
const missed = (each, trivial = false) => each.misses.filter((miss) => miss.trivial === trivial).reduce((sum, miss) => sum + miss.count, 0);
const broken = (each) => Boolean(each.contract && each.contract.broken);

function strip(parts) {
  const total = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  return h("div", { class: "strip", "aria-hidden": "true" },
    parts.map((part) => h("span", { title: part.label, style: { flex: `${part.size / total} 1 0`, background: part.colour } })));
}
function legend(parts) {
  return h("ul", { class: "legend" }, parts.map((part) => h("li", {}, h("i", { style: { background: part.colour } }), part.label)));
}

function haystack(each) {
  const lines = each.diff ? each.diff.rows.filter((_, at) => at % 3).map((line) => (line < 0 ? "" : facts.lines[line])) : [];
  const places = each.places.map((place) => `${place.module} ${place.source} ${place.names.join(" ")}`);
  const misses = each.misses.map((miss) => `${miss.reason} ${miss.source} ${miss.suggestion} ${miss.names.join(" ")}`);
  return [each.summary, ...each.notes, ...places, ...misses, ...new Set(lines)].join("\n").toLowerCase();
}

function timelineRow(each, at, longest) {
  const ran = each.status === "ran";
  const dot = broken(each) ? "bad" : ran && each.sites ? "good" : "";
  const [before, after] = each.nodes;
  const nodes = before === null || !ran ? "" : before === after ? number(after) : `${number(before)} → ${number(after)}`;
  const width = each.seconds ? `${Math.max(2, (each.seconds / longest) * 70)}%` : "0";
  const lost = missed(each);
  return h("li", {}, h("button", {
    type: "button", "data-find": true, "data-more": haystack(each), class: ran && each.sites ? null : "idle",
    on: { click: () => choose(at) },
  },
    h("span", { class: `dot ${dot}` }),
    h("span", { class: "name" }, each.key),
    h("span", { class: "stage" }, each.stage ? h("i", { style: { background: colour(each.stage) } }) : null, each.stage),
    h("span", { class: "num sites" }, ran ? plural(each.sites, "site") : each.status),
    h("span", { class: "num nodes" }, nodes),
    h("span", { class: "took" }, each.seconds && ran ? [h("i", { style: { width, background: colour(each.stage) } }), seconds(each.seconds)] : null),
    h("span", { class: "num missed" }, lost ? number(lost) : ""),
    h("span", { class: "numbers" }, ran && each.sites ? tag(each.numerics, each.numerics === "exact" ? "good" : "warn") : "")));
}

let rows = [], detail = null;
function timeline() {
  const all = facts.transforms;
  if (!all.length) { section("transforms", "Timeline", why("The package has no matches.lock, so its transforms are unknown.")); return; }
  const longest = Math.max(...all.map((each) => each.seconds || 0), 1e-9);
  const list = h("ol", { class: "timeline", "aria-label": "Transforms in execution order" },
    h("li", { "aria-hidden": "true" }, h("div", { class: "head" },
      [["", ""], ["transform", ""], ["stage", ""], ["matched", "num"], ["nodes", "num"], ["time", ""], ["missed", "num"], ["numerics", ""]].map(([text, kind]) => h("span", { class: kind }, text)))),
    all.map((each, at) => timelineRow(each, at, longest)));
  rows = [...list.querySelectorAll("button")];
  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    step(event.key === "ArrowDown" ? 1 : -1, true);
  });
  detail = h("div", { class: "detail", id: "detail", role: "region", "aria-label": "Transform details" });
  section("transforms", "Timeline", clock(all), list, detail);
  finders.push({ section: "transforms", find: (wanted) => marks(detail, wanted) });
}

function clock(all) {
  const spent = Object.entries(facts.seconds);
  if (!spent.length) return why("A package stores neither the time of each transform nor the intermediate programs. Use `inlay report MODEL`.");
  const parts = all.filter((each) => each.seconds > 0).map((each) => ({ size: each.seconds, label: `${each.key} ${seconds(each.seconds)}`, colour: colour(each.stage) }));
  const stages = [...new Set(all.filter((each) => each.seconds > 0).map((each) => each.stage))];
  const shares = stages.map((stage) => ({ colour: colour(stage), label: `${stage} ${seconds(all.filter((each) => each.stage === stage).reduce((sum, each) => sum + each.seconds, 0))}` }));
  return [strip(parts), legend(shares), h("p", { class: "why" }, spent.map(([name, value]) => `${name} ${seconds(value)}`).join(", ") + ". “watch” is the time for the diffs and explanations of this page; a build does not need it.")];
}

function visible() { return rows.map((row, at) => (row.hidden ? -1 : at)).filter((at) => at >= 0); }
function step(by, focus) {
  const open = visible();
  if (!open.length) return;
  const place = open.indexOf(state.transform);
  const next = open[Math.min(open.length - 1, Math.max(0, place < 0 ? 0 : place + by))];
  choose(next);
  if (focus) rows[next].focus();
}

function choose(at) {
  state.transform = at;
  rows.forEach((row, place) => { if (place === at) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current"); });
  drawDetail();
  remember();
}

function contract(each) {
  const terms = each.contract;
  if (!terms) return null;
  if (terms.broken) return h("p", { class: "say" }, tag("contract broken", "bad"), " ", terms.broken);
  if (terms.wanted !== null) return h("p", { class: "say" }, tag("as expected", "good"), ` ${plural(terms.wanted, "site")} (${terms.expect})${terms.reason ? `: ${terms.reason}` : ""}`);
  if (terms.expect === "any") return h("p", { class: "say" }, tag("any count"), ` ${terms.reason}`);
  return null;
}

function names(list, count) {
  if (!list.length) return null;
  const more = count > list.length ? ` and ${number(count - list.length)} more` : "";
  return h("details", {}, h("summary", {}, "names"), h("div", { class: "names", tabindex: 0, role: "region", "aria-label": "Names" }, list.join(", ") + more));
}

function drawDetail() {
  const each = facts.transforms[state.transform];
  const heading = h("div", { class: "title" },
    h("h3", { class: "big" }, each.key, " ", each.status === "ran" ? tag(plural(each.sites, "site"), each.sites ? "good" : "") : tag(each.status), " ", tag(each.numerics)),
    h("div", { class: "step" },
      h("button", { type: "button", on: { click: () => step(-1) }, title: "Previous transform (k)" }, "← previous"),
      h("button", { type: "button", on: { click: () => step(1) }, title: "Next transform (j)" }, "next →")));
  detail.replaceChildren(heading, h("p", { class: "say" }, said(each.summary)), ...[contract(each)].filter(Boolean));
  for (const note of each.notes) detail.append(h("p", { class: "say" }, said(note)));
  detail.append(difference(each), ...sites(each), ...misses(each));
  marks(detail, words());
}

function difference(each) {
  if (!each.diff) {
    const text = each.status !== "ran" ? `This transform is ${each.status}: ${each.skip_reason || "`enabled` is false in the configuration"}.`
      : !each.sites ? "No matches; the program is unchanged."
      : "A package does not contain the programs before and after. Use `inlay report MODEL`.";
    return why(text);
  }
  const redraw = () => { const kept = scrollY; drawDetail(); scrollTo({ top: kept, behavior: "instant" }); };
  return h("div", {},
    h("div", { class: "tools-row" },
      toggle("Whole program", state.whole, () => { state.whole = !state.whole; redraw(); detail.querySelector("[aria-pressed]").focus(); }),
      toggle("Types", state.types, () => { state.types = !state.types; redraw(); detail.querySelectorAll("[aria-pressed]")[1].focus(); }),
      h("p", { class: "why" }, `${number(each.diff.nodes[0])} → ${number(each.diff.nodes[1])} nodes. Repeated blocks are shown once.`)),
    diffView(each.diff, [`before ${each.key}`, "after"], state.whole),
    operatorsTable(each.diff.operators), bindingSentences(each.diff.bindings));
}

function sites(each) {
  if (!each.places.length) return [];
  return [h("h4", {}, "Sites"), table("Sites", ["#sites", "layers", "source", "module", ""],
    each.places.map((place) => [number(place.count), place.layers, code(place.source), code(place.module), names(place.names, place.count)]))];
}

function misses(each) {
  const near = each.misses.filter((miss) => !miss.trivial), trivial = each.misses.filter((miss) => miss.trivial);
  const rows = (list, label) => table(label, ["#sites", "reason", "#nodes matched", "layers", "source", ""],
    list.map((miss) => [number(miss.count), [miss.reason, miss.suggestion ? h("div", { class: "why" }, miss.suggestion) : null],
      `${miss.matched} of ${miss.of}`, miss.layers, code(miss.source), names(miss.names, miss.count)]));
  const kinds = new Map();
  for (const miss of near) kinds.set(miss.kind, (kinds.get(miss.kind) || 0) + miss.count);
  const counted = [...kinds].sort((one, two) => two[1] - one[1]).map(([kind, count]) => `${kind}${times(count)}`).join(", ");
  const none = each.status === "ran" ? [why(facts.kind === "package" ? "No misses were recorded." : "No near misses.")] : [];
  return [...(near.length ? [h("h4", {}, "Misses by reason: ", counted), rows(near, "Misses")] : none),
    trivial.length ? h("details", {}, h("summary", {}, `${plural(missed(each, true), "trivial miss", "trivial misses")}: one node of the pattern matched, or less than half`), rows(trivial, "Trivial misses")) : null].filter(Boolean);
}
