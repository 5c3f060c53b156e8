/* All sections except the timeline. */
function tile(name, value, more, kind) {
  return h("div", { class: `tile ${kind || ""}`, "data-find": true }, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));
}

function overview() {
  const ran = facts.transforms.filter((each) => each.status === "ran");
  const bad = facts.transforms.filter(broken);
  const skipped = facts.transforms.filter((each) => each.status === "skipped").length;
  const lost = (trivial) => facts.transforms.reduce((sum, each) => sum + missed(each, trivial), 0);
  const nearness = plural(lost(false), "near miss", "near misses") + (lost(true) ? `; ${number(lost(true))} trivial` : "");
  const total = ran.reduce((sum, each) => sum + each.sites, 0);
  const weights = facts.memory.weights.reduce((sum, row) => sum + row.bytes, 0);
  const [before, after] = facts.nodes;
  const versions = Object.entries(facts.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  const shape = facts.facts.map(([name, value, origin]) => h("span", { title: `source: ${origin}` }, h("b", {}, number(value)), ` ${name.replaceAll("_", " ")}`));
  section("overview", "Overview",
    h("p", { class: "shape", "data-find": true }, h("span", {}, h("b", {}, facts.architecture || "a module")), shape),
    h("p", { class: "why", "data-find": true }, `Created with ${versions}${facts.target ? `, for ${facts.target}` : ""}.`),
    h("dl", { class: "tiles" },
    before !== null ? tile("nodes", after !== null ? `${number(before)} → ${number(after)}` : number(before), after !== null ? "captured → transformed" : "captured") : null,
    tile("transforms", `${ran.filter((each) => each.sites).length} of ${ran.length}`, `that ran have matches${skipped ? `; ${skipped} skipped` : ""}`),
    tile("sites", number(total), nearness),
    tile("contracts", bad.length ? `${bad.length} broken` : facts.kind === "package" ? "met at build" : "met", bad.map((each) => each.key).join(", "), bad.length ? "bad" : ""),
    tile("weights", bytes(weights), plural(facts.memory.weights.reduce((sum, row) => sum + row.count, 0), "tensor")),
    tile("state", bytes(facts.memory.state), "per session"),
    ));
}

function programs() {
  if (!facts.programs.length) { section("program", "Program", why("A package contains compiled pieces, not the program. Use `inlay report MODEL`.")); return; }
  const boxes = facts.programs.map((program) => {
    const made = h("details", {}, h("summary", {}, `The program ${program.title}, folded: ${plural(program.lines.length, "line")}`));
    made.addEventListener("toggle", () => { if (made.open && made.children.length === 1) { made.append(listing(program)); marks(made, words()); } });
    return made;
  });
  section("program", "Program", boxes);
  const lines = facts.programs.map((program) => program.lines.map((at) => facts.lines[at].toLowerCase()));
  finders.push({ section: "program", find: (wanted) => {
    boxes.forEach((box) => marks(box, wanted));
    return wanted.length ? lines.flat().filter((line) => holds(line, wanted)).length : 0;
  } });
}

function candidates() {
  const found = facts.candidates;
  section("candidates", "Fusion candidates", why(found.why), found.searched ? why(`Searched: ${found.searched}. \`inlay candidates MODEL --as-built\` searches the same.`) : null,
    found.rows.length ? h("p", { class: "why" }, `Savings are computed for ${found.sizes}.`) : null,
    found.rows.map((each) => h("details", { "data-find": true },
      h("summary", {}, h("b", {}, each.name), `${times(each.occurrences)} · ${plural(each.saved.launches, "launch", "launches")} and ${bytes(each.saved.decode)} per decode step saved `, tag(each.recommendation)),
      table(each.name, ["", ""], [
        ["pattern", code(each.pattern)], ["source", code(each.source)], ["sharing", each.together], ["saved in prefill", bytes(each.saved.prefill)],
        ["kernels", each.lookup], ["evidence", each.evidence], ["support", each.support], ["numerical risk", each.numerical_risk], ["strengths", each.strengths], ["weaknesses", each.weaknesses],
        ["risks", each.risks], ["overlaps", each.overlaps.join("; ")],
      ].filter(([, text]) => typeof text !== "string" || text)))));
}

function port(text, count) { return h("div", { class: "port" }, code(text), times(count)); }
function drawn(row) {
  const size = row.bytes ? ` · ${bytes(row.bytes)}` : "";
  const out = row.kind === "state" && row.members[0].length > 1 ? (row.count > 1 ? row.members[0][1].replace(/\d+/, "*") : row.members[0][1]) : row.name;
  const cell = (text, extra) => h("div", { class: `cell ${extra || ""}` }, code(row.type), h("small", {}, size), h("div", {}, h("small", {}, text)));
  const arrow = () => h("div", { class: "arrow" });
  const gap = () => h("div", {});
  const label = row.kind === "state" ? `${row.name} and ${out} share storage` : row.name;
  const parts = row.kind === "state" ? [port(row.name, row.count), arrow(), cell(`one storage, written in place (${row.why})`), arrow(), port(out, row.count)]
    : row.kind === "input" ? [port(row.name, row.count), arrow(), cell("owned by the caller, read only"), gap(), gap()]
    : [gap(), gap(), cell("allocated at every call", "new"), arrow(), port(row.name, row.count)];
  return h("div", { class: `storage ${row.kind}`, "data-find": true, "aria-label": label, role: "group" }, parts);
}

function bindings() {
  const all = facts.bindings, of = (...kinds) => all.filter((row) => kinds.includes(row.kind));
  const inline = of("input", "state", "output"), weights = of("weight");
  const members = of("state").filter((row) => row.count > 1).map((row) => h("details", { "data-find": true },
    h("summary", {}, `${row.name}: all ${number(row.count)}`),
    table(row.name, ["input", "aliased output"], row.members.map(([one, two]) => [code(one), code(two)]))));
  section("bindings", "Bindings and storage",
    h("p", { class: "why" }, "Inputs, storage and outputs. A green storage is state: the output aliases the input."),
    inline.map(drawn), members,
    weights.length ? [h("h3", {}, "Weights"), table("Weights", ["weight", "#tensors", "type", "#bytes", "read from"],
      weights.map((row) => [code(row.name), number(row.count), code(row.type), bytes(row.bytes), row.from]))] : null);
}

function kernels(piece) {
  if (!piece.kernels.length) return null;
  const rows = piece.kernels.flatMap((kernel) => kernel.timings.map((timing, at) => {
    const others = Object.entries(timing.microseconds).filter(([way]) => way !== timing.way).map(([way, took]) => `${way} ${took}`).join(", ");
    return [at ? "" : code(`${kernel.layer}, ${kernel.bits} bits`), number(timing.rows), timing.way, `${timing.microseconds[timing.way]} µs`, others];
  }));
  return h("details", {}, h("summary", {}, `${piece.name}: kernels chosen for ${plural(piece.kernels.length, "linear layer")}`),
    table(`Kernels of ${piece.name}`, ["linear layer", "#rows", "kernel", "#time", "other kernels, µs"], rows));
}
function operators(piece) {
  const rows = Object.entries(piece.operators);
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, `${piece.name}: most frequent operators`), table(`Operators of ${piece.name}`, ["operator", "#calls"], rows.map(([name, count]) => [code(name), number(count)])));
}
function plan() {
  const pieces = (bucket) => table(`Pieces for ${bucket.sizes}`, ["piece", "#steps", "execution", facts.kind === "package" ? "#fallback calls" : "#calls", "#weights per step", "#states", "#code size"],
    bucket.pieces.map((piece) => [piece.name, `× ${number(piece.steps)}`, piece.what, number(piece.calls), bytes(piece.weights), number(piece.states), piece.size === null ? "not built" : bytes(piece.size)]));
  section("plan", "Plan and pieces", why(facts.plan.why), facts.plan.buckets.map((bucket) => [
    h("h3", {}, `Bucket ${bucket.name}: ${bucket.sizes}`),
    h("ol", { class: "flow", "aria-label": "Steps in order" }, bucket.order.map(([name, count]) => h("li", { class: count > 1 ? "block" : null }, `${name}${times(count)}`))),
    pieces(bucket), bucket.pieces.map(kernels), bucket.pieces.map(operators)]));
}

function memory() {
  const found = facts.memory;
  const parts = [...found.weights.map((row, at) => ({ size: row.bytes, colour: `var(--c${(at % 5) + 1})`, label: `weights in ${row.dtype}: ${bytes(row.bytes)} in ${plural(row.count, "tensor")}` })),
    { size: found.state, colour: "var(--c6)", label: `state per session: ${bytes(found.state)}` }];
  if (found.code) parts.push({ size: found.code, colour: "var(--c7)", label: `code: ${bytes(found.code)}` });
  section("memory", "Memory", strip(parts), legend(parts), why(found.why),
    found.activations.length ? [h("h3", {}, "Largest intermediate value of each piece"), table("Largest values", ["bucket", "piece", "#bytes", "type", "value", "#computed for"],
      found.activations.map((row) => [row.bucket, row.piece, bytes(row.bytes), code(row.type), code(row.value), `batch 1, ${plural(row.rows, "row")}`]))] : null);
}

function drift() {
  const measured = new Map(facts.drift.rows.map((row) => [row.transform, row]));
  const changed = facts.transforms.filter((each) => each.sites);
  const columns = measured.size ? ["transform", "declared", "measured", "#difference", "#error before", "#error after", ""] : ["transform", "declared"];
  section("drift", "Numerical drift", why(facts.drift.why),
    measured.size ? h("p", { class: "why" }, "Difference: largest difference from the previous program, relative to the largest result. Errors: root mean square against the captured program in float64. Changes that only a build enables (KV cache, packed weights, last row only) are not measured.") : null,
    changed.length ? table("Drift", columns, changed.map((each) => {
      const row = measured.get(each.key);
      const first = [each.key, tag(each.numerics, each.numerics === "exact" ? "good" : "warn")];
      if (!measured.size) return first;
      if (!row) return [...first, "not measured", "", "", "", ""];
      const kind = row.change === "wrong" ? "bad" : row.change === "none" ? "good" : "";
      return [...first, tag(row.change, kind), small(row.difference), small(row.error_before), small(row.error_after), row.reason || row.worst.map((one) => `${one.node} ${small(one.error)}`).join("; ")];
    })) : why("No transform changed anything."));
}

function configuration() {
  const found = facts.configuration, origins = found.rows.some((row) => row[3]);
  section("configuration", "Configuration", why(found.why),
    found.rows.length ? table("Configuration", origins ? ["transform", "option", "value", "from"] : ["transform", "option", "value"],
      found.rows.map(([key, name, value, origin]) => [key, name, code(value), ...(origins ? [origin === "built in" ? h("span", { class: "none" }, origin) : origin] : [])])) : null);
}

/* The lanes of a schedule, if a timeline was passed. */
function lanes() {
  const found = facts.lanes;
  if (!found) return;
  const picture = h("img", { alt: found.says, src: `data:image/svg+xml,${encodeURIComponent(found.picture)}` });
  section("lanes", "Lanes", h("dl", { class: "tiles" }, found.figures.map(([name, value]) => tile(name, value))),
    h("h3", {}, "Timeline"), h("div", { class: "box", tabindex: 0, role: "region", "aria-label": "Timeline of the lanes" }, picture),
    h("h3", {}, "Tasks"), table("Tasks", ["task", "#lane", "#start", "#duration", "#wait", ""],
      found.rows.map(([task, lane, began, took, waited, critical]) => [code(task), number(lane), began, took, waited, critical ? tag("critical", "warn") : ""])));
}

/* The passes of a program that was watched. */
function watched() {
  const all = facts.passes, near = (each) => each.findings.filter((miss) => !miss.trivial);
  const count = (each) => near(each).reduce((sum, miss) => sum + miss.roots.length, 0);
  const places = (each) => [...new Set(each.places.filter(Boolean))].map((place) => h("div", {}, code(place), times(each.places.filter((one) => one === place).length)));
  section("overview", "Overview", h("dl", { class: "tiles" },
    tile("passes", `${all.filter((each) => each.matches).length} of ${all.length}`, "have matches"),
    tile("matches", number(all.reduce((sum, each) => sum + each.matches, 0))),
    tile("near misses", number(all.reduce((sum, each) => sum + count(each), 0))),
    Object.entries(facts.versions).map(([name, version]) => tile(name, version))));
  section("passes", "Passes", table("Passes", ["pass", "#patterns", "#matches", "#near misses", "matches by pattern", "matched at"],
    [...all].sort((one, two) => Boolean(two.matches || count(two)) - Boolean(one.matches || count(one))).map((each) => [each.name, number(each.num_patterns), number(each.matches), number(count(each)), Object.entries(each.patterns).map(([name, sites]) => h("div", {}, code(name), times(sites))), places(each)])));
  section("misses", "Near misses", all.some(count) ? null : why("No near misses."), all.filter((each) => count(each) || each.error).map((each) => [h("h3", {}, each.name), why(each.error),
    table(`Near misses of ${each.name}`, ["pattern", "#sites", "node", "reason", "#nodes matched", "layers", "source"], near(each).map((miss) => [code(miss.transform), number(miss.roots.length), code(miss.node),
      [miss.reason, miss.suggestion ? h("div", { class: "why" }, miss.suggestion) : null], `${miss.matched} of ${miss.of}`, miss.layers.join(", "), code(miss.source)]))]));
  const functions = all.filter((each) => Object.keys(each.changes).length);
  if (functions.length) section("functions", "Functions that edit a graph", table("Functions", ["function", "changes", "calls left"], functions.map((each) => [each.name,
    Object.entries(each.changes).map(([change, calls]) => h("div", {}, code(change), times(calls))),
    Object.entries(each.num_left).map(([name, calls]) => h("div", {}, code(name), times(calls)))])));
  const dropped = all.reduce((sum, each) => sum + each.dropped, 0);
  if (dropped) section("dropped", "Dropped records", why(`${number(dropped)} records were dropped.`));
  comparedTables();
}

/* The comparison of two sides. */
function comparison() {
  section("overview", "Overview", h("dl", { class: "tiles" },
    tile("left", facts.sides[0]), tile("right", facts.sides[1]),
    tile("result", facts.equal ? "equal" : "different", null, facts.equal ? "" : "bad"),
    facts.diff ? tile("nodes", `${number(facts.diff.nodes[0])} → ${number(facts.diff.nodes[1])}`) : null,
    Object.entries(facts.versions).map(([name, version]) => tile(name, version))));
  comparedTables();
  if (facts.diff) programsCompared();
}
function comparedTables() {
  facts.tables.forEach((found, at) => {
    const differing = found.rows.filter(([, left, right]) => left !== right).length;
    section(`table-${at}`, found.title, h("p", { class: "why" }, differing ? `${plural(differing, "row")} of ${number(found.rows.length)} ${differing === 1 ? "differs" : "differ"}.` : "Equal on both sides."),
      found.rows.length ? table(found.title, ["", ...(found.columns || ["left", "right"])], found.rows.map(([name, left, right]) => ({ differs: left !== right, cells: [name, left || h("span", { class: "none" }, "none"), right || h("span", { class: "none" }, "none")] }))) : null);
  });
}
function programsCompared() {
  const home = h("div", {});
  const draw = () => {
    home.replaceChildren(h("div", { class: "tools-row" },
      toggle("Whole program", state.whole, () => { state.whole = !state.whole; draw(); home.querySelector("button").focus(); }),
      toggle("Types", state.types, () => { state.types = !state.types; draw(); home.querySelectorAll("button")[1].focus(); })),
      diffView(facts.diff, facts.sides, state.whole));
    add(home, [operatorsTable(facts.diff.operators), bindingSentences(facts.diff.bindings)]);
    marks(home, words());
  };
  draw();
  section("program", "Program", home);
  finders.push({ section: "program", find: (wanted) => marks(home, wanted) });
}
