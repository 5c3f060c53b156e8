/* Programs: highlighting, side-by-side differences, listings. */
const TOKEN = /(\s+#.*$)|('[^']*')|\b(def|for|in|return|import|from|if|else|zip)\b|(\b(?:inlay|aten|prims)(?:\.\w+)+)|([A-Za-z_][\w.]*(?=\())|(\b\d[\w.+-]*\b)|([A-Za-z_][\w.]*)|(\s+)|(.)/g;
const CLASSES = [null, "note", "s", "k", "op", "f", "n", null, null, null];

function tokens(text) {
  const found = [];
  for (const match of text.matchAll(TOKEN)) {
    const group = match.findIndex((part, at) => at > 0 && part !== undefined);
    let kind = CLASSES[group];
    if (kind === "op") kind = match[0].startsWith("inlay") ? "own" : "f";
    found.push({ text: match[0], kind });
  }
  return found;
}

/* The longest common subsequence of the tokens of two lines; other tokens are highlighted. */
function changedTokens(left, right) {
  const short = left.length * right.length < 40000;
  const kept = [new Set(), new Set()];
  if (short) {
    const best = Array.from({ length: left.length + 1 }, () => new Uint16Array(right.length + 1));
    for (let i = left.length - 1; i >= 0; i--)
      for (let j = right.length - 1; j >= 0; j--)
        best[i][j] = left[i].text === right[j].text ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    for (let i = 0, j = 0; i < left.length && j < right.length; ) {
      if (left[i].text === right[j].text) { kept[0].add(i++); kept[1].add(j++); }
      else if (best[i + 1][j] >= best[i][j + 1]) i++;
      else j++;
    }
  }
  return kept;
}

function inked(parts, kept) {
  return parts.map((part, at) => {
    let made = part.kind ? h("span", { class: part.kind }, part.text) : document.createTextNode(part.text);
    if (kept && !kept.has(at) && part.text.trim() && part.kind !== "note") made = h("b", { class: "new" }, made);
    return made;
  });
}

const indent = (text) => text.length - text.trimStart().length;
function side(text, parts, kept) {
  return h("span", { style: { "--indent": indent(text) } }, inked(parts, kept));
}

function diffRow(kind, left, right) {
  const texts = [left < 0 ? "" : facts.lines[left], right < 0 ? "" : facts.lines[right]];
  const parts = texts.map((text) => tokens(text.trimStart()));
  const kept = kind === 1 ? changedTokens(...parts) : [null, null];
  const made = h("div", { class: `row ${KINDS[kind]}` }, texts.map((text, at) => side(text, parts[at], kept[at])));
  made.dataset.text = texts.join("\n").toLowerCase();
  return made;
}

const AROUND = 3;
/* Rows to show: those that differ, context rows, and the header of the enclosing function. */
function shownRows(rows, count) {
  const shown = new Uint8Array(count);
  let head = -1;
  for (let at = 0; at < count; at++) {
    const line = facts.lines[Math.max(rows[3 * at + 1], rows[3 * at + 2])] || "";
    if (line.startsWith("def ")) head = at;
    if (rows[3 * at] === 0) continue;
    shown.fill(1, Math.max(0, at - AROUND), Math.min(count, at + AROUND + 1));
    if (head >= 0) shown[head] = 1;
  }
  return shown;
}

function diffView(found, names, whole) {
  const rows = found.rows, count = rows.length / 3;
  const box = h("div", { class: `diff ${state.types ? "" : "plain"}`, tabindex: 0, role: "region", "aria-label": `${names[0]} and ${names[1]}, side by side` },
    h("div", { class: "heads" }, h("span", {}, names[0]), h("span", {}, names[1])));
  const shown = whole ? new Uint8Array(count).fill(1) : shownRows(rows, count);
  const row = (at) => diffRow(rows[3 * at], rows[3 * at + 1], rows[3 * at + 2]);
  for (let at = 0; at < count; ) {
    if (shown[at]) { box.append(row(at++)); continue; }
    let end = at;
    while (end < count && !shown[end]) end++;
    if (end - at === 1) { box.append(row(at++)); continue; } /* a button would not save space */
    const from = at, to = end;
    const gap = h("button", { type: "button", class: "gap" }, `⋯ ${plural(to - from, "equal line")}`);
    gap.addEventListener("click", () => {
      const made = Array.from({ length: to - from }, (_, step) => row(from + step));
      const next = gap.nextElementSibling;
      gap.replaceWith(...made);
      marks(box, words());
      (next && next.matches("button") ? next : box).focus();
    });
    box.append(gap);
    at = end;
  }
  if (!count) box.append(h("p", { class: "why" }, "The two programs are equal."));
  return box;
}

function listing(program) {
  const box = h("div", { class: "listing", tabindex: 0, role: "region", "aria-label": `The program ${program.title}` });
  for (const at of program.lines) {
    const text = facts.lines[at];
    const line = h("div", { style: { "--indent": indent(text) } }, text ? inked(tokens(text.trimStart())) : " ");
    line.dataset.text = text.toLowerCase();
    box.append(line);
  }
  return box;
}

/* Mark the lines that contain the words; return how many. */
function marks(box, wanted) {
  let found = 0;
  for (const line of box.querySelectorAll("[data-text], #detail tr[data-find]")) {
    const match = wanted.length > 0 && holds(line.dataset.text ?? textOf(line), wanted);
    line.classList.toggle("hit", match);
    found += match;
  }
  return found;
}

function toggle(label, pressed, act) {
  return h("button", { type: "button", "aria-pressed": pressed ? "true" : "false", on: { click: act } }, label);
}

function operatorsTable(operators) {
  const rows = Object.entries(operators);
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, `${plural(rows.length, "operator")} with changed call counts`),
    table("Operators", ["operator", "#change"], rows.map(([name, change]) =>
      [code(name), h("span", { class: change < 0 ? "fewer" : "more" }, change > 0 ? `+${number(change)}` : `−${number(-change)}`)])));
}

function bindingSentences(sentences) {
  if (!sentences.length) return null;
  return h("details", {}, h("summary", {}, `${plural(sentences.length, "change")} to inputs, outputs and weights`),
    h("ul", {}, sentences.map((text) => h("li", {}, text))));
}
