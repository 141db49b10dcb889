// The page: graphs in tabs, search, details of nodes, steps of proofs on demand.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STEPS_AT_ONCE = 200;
const SECTIONS = ["graphs", "rewrites", "cost", "modules", "memory", "proof"];
const search = document.getElementById("search");
const panels = [...document.querySelectorAll(".graph")];
const tabs = [...document.querySelectorAll("[role=tab]")];
const views = new Map();

class GraphView {
  constructor(panel) {
    this.panel = panel;
    this.data = DATA[Number(panel.dataset.index)];
    this.details = panel.querySelector(".facts");
    this.linked = panel.querySelector("[data-do=linked]");
    this.layer = panel.querySelector(".layer");
    const dearest = Math.max(...["before", "after"].flatMap((s) => this.data[s].nodes.map((n) => n.cost)), 0);
    this.panes = ["before", "after"].map((side) => {
      const root = panel.querySelector(`[data-side=${side}]`);
      const chosen = (pane, id) => this.choose(pane, id);
      return new Pane(root, side, this.data[side], dearest, chosen, () => this.showLayer());
    });
    panel.querySelector("[data-do=weights]").addEventListener("change", (event) => {
      for (const pane of this.panes) {
        pane.draw(event.target.checked ? "all" : "flow");
        pane.start();
      }
      this.details.hidden = true;
      find();
    });
    const bands = Math.max(...this.panes.map((pane) => pane.drawn.bands.length));
    panel.querySelector(".stepper").hidden = bands < 2;
    panel.querySelector("[data-do=layer-back]").addEventListener("click", () => this.step(-1));
    panel.querySelector("[data-do=layer-on]").addEventListener("click", () => this.step(1));
    for (const button of panel.querySelectorAll(".more")) {
      button.addEventListener("click", () => this.expand(button));
    }
    panel.querySelector(".steps")?.addEventListener("toggle", (event) => this.showProof(event.target));
  }

  step(by) {
    const banded = this.panes.filter((pane) => pane.drawn.bands.length);
    const last = Math.max(...banded.map((pane) => pane.drawn.bands.length)) - 1;
    const number = Math.max(0, Math.min(last, banded[0].band + by));
    for (const pane of banded) pane.toBand(number);
  }

  showLayer() {
    const pane = this.panes?.find((p) => p.drawn.bands.length);
    if (pane) this.layer.textContent = `layer ${Math.max(1, pane.band + 1)} of ${pane.drawn.bands.length}`;
  }

  // The same value in the other graph is chosen with it.
  choose(pane, id) {
    const other = this.panes.find((p) => p !== pane);
    const node = id === null ? null : pane.nodes.get(id);
    const equal = node && [...other.nodes.values()].find((n) => n.name === node.name && n.kind !== "weight");
    const shown = equal && other.places.has(equal.id);
    other.select(shown ? equal.id : null, { quiet: true, centre: Boolean(shown) && this.linked.checked });
    for (const p of this.panes) p.mark(node ? node.group : -1);
    if (node && !shown && this.linked.checked) other.centre(other.peers(node.group)[0]);
    this.details.hidden = !node;
    if (!node) return;
    const pair = element("div", { class: "pair" });
    for (const [p, n] of this.panes.map((p) => [p, p === pane ? node : equal])) {
      pair.append(n ? this.about(p, n) : this.absent(p));
    }
    this.details.replaceChildren(pair);
  }

  absent(pane) {
    const text =
      pane.side === "after"
        ? "This value is not computed any more; what replaces it is marked."
        : "This value is new; what it replaces is marked.";
    return element("div", {}, element("h3", {}, element("small", {}, `${pane.side}: `)), text);
  }

  about(pane, node) {
    const list = element("dl", {});
    const row = (name, ...value) => list.append(element("dt", {}, name), element("dd", {}, ...value));
    row("name", element("code", {}, node.called || node.name));
    if (node.module) row("module", finder(node.module));
    const line = this.data.lines[node.line];
    if (line) row("line", finder(line[0], line[1]), " ", element("code", {}, line[2]));
    row("type", element("code", {}, node.type));
    if (node.attrs) row("arguments", element("code", {}, node.attrs));
    row("cost", node.kind === "folded" ? "none: folded once from weights" : cost(node.cost));
    const links = (ids) =>
      ids.map((id) => {
        const to = pane.nodes.get(id);
        const button = element("button", { type: "button" }, to.op === "input" ? to.called || to.name : `${to.op} ${to.name}`);
        button.disabled = !pane.places.has(id);
        button.addEventListener("click", () => pane.select(id, { centre: true }));
        return button;
      });
    if (node.inputs.length) row("inputs", ...links(node.inputs));
    if (pane.users.get(node.id).length) row("users", ...links(pane.users.get(node.id)));
    const title = element("h3", {}, element("small", {}, `${pane.side}: `), node.op);
    return element("div", {}, title, list);
  }

  expand(button) {
    const body = button.closest("tbody");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) return body.querySelector(".inside").parentElement.remove();
    const list = element("ol", { class: "list bare" });
    const number = this.data.rules.indexOf(body.dataset.rule);
    const steps = this.data.proof.map((step, i) => [i, step]).filter(([, step]) => step[0] === number);
    fill(list, steps, this.data.rules, 20, false);
    body.append(element("tr", {}, element("td", { class: "inside", colspan: 4 }, list)));
  }

  showProof(details) {
    const list = details.querySelector(".list");
    if (!details.open || list.childElementCount) return;
    const steps = this.data.proof.map((step, i) => [i, step]);
    fill(list, steps, this.data.rules, STEPS_AT_ONCE);
    find();
  }
}

// A button that searches for what stands on it.
function finder(text, title = "") {
  return element("button", { type: "button", class: "find", title }, text);
}

// Adds the next steps to a list, with a button for more of them.
function fill(list, steps, rules, atOnce, named = true) {
  for (const [number, [rule, forward, before, after]] of steps.slice(0, atOnce)) {
    const [from, to] = differing(before, after);
    const way = forward ? [] : [element("div", { class: "way" }, "right to left")];
    list.append(
      element(
        "li",
        { "data-search": `${rules[rule]} ${before} ${after}` },
        element("span", { class: "no" }, String(number + 1)),
        element("span", {}, named ? rules[rule] : "", ...way),
        element("div", {}, element("code", {}, ...from), element("code", {}, ...to)),
      ),
    );
  }
  const rest = steps.slice(atOnce);
  if (!rest.length) return;
  const more = element("button", { type: "button" }, `${rest.length} more`);
  const row = element("li", {}, element("span", {}), more);
  more.addEventListener("click", () => {
    row.remove();
    fill(list, rest, rules, STEPS_AT_ONCE, named);
  });
  list.append(row);
}

// Both texts, with the words marked that the other has not.
function differing(a, b) {
  const parts = (text) => text.split(/(?<=[ ()])|(?=[ ()])/);
  const [first, second] = [parts(a), parts(b)];
  const marked = (words, others) => {
    const known = new Set(others);
    return words.map((word) => (known.has(word) ? word : element("mark", {}, word)));
  };
  return [marked(first, second), marked(second, first)];
}

let found = [];
let current = -1;

function find() {
  const text = search.value.trim().toLowerCase();
  const words = text.split(/\s+/).filter(Boolean);
  const matches = (value) => words.every((word) => value.includes(word));
  const view = views.get(panels.find((panel) => !panel.hidden));
  const line = (n) => view.data.lines[n.line]?.[0] ?? "";
  const about = (n) => `${n.op} ${n.name} ${n.called} ${n.module} ${line(n)} ${n.type} ${n.attrs} ${n.kind} ${n.reads}`;
  const node = (n) => matches(about(n).toLowerCase());
  found = [];
  current = -1;
  const counts = [];
  for (const pane of view?.panes ?? []) {
    const ids = pane.find(words.length ? node : null);
    found.push(...ids.map((id) => [pane, id]));
    counts.push(`${ids.length} ${pane.side}`);
  }
  let rows = 0;
  for (const row of document.querySelectorAll("[data-search]")) {
    const hit = !words.length || matches(row.dataset.search.toLowerCase());
    row.hidden = !hit;
    if (hit && !row.closest("[hidden]")) rows++;
  }
  const output = document.getElementById("found");
  output.textContent = words.length ? `nodes: ${counts.join(", ")}; rows: ${rows}` : "";
  for (const id of ["previous", "next"]) document.getElementById(id).disabled = !found.length;
}

function go(by) {
  if (!found.length) return;
  if (current >= 0) found[current][0].elements.get(found[current][1]).classList.remove("now");
  current = (current + by + found.length) % found.length;
  const [pane, id] = found[current];
  pane.elements.get(id).classList.add("now");
  pane.centre(id);
}

function showTab(index) {
  panels.forEach((panel, i) => (panel.hidden = i !== index));
  tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", String(i === index));
    tab.tabIndex = i === index ? 0 : -1;
  });
  // A graph is drawn when it is first seen.
  if (!views.has(panels[index])) views.set(panels[index], new GraphView(panels[index]));
  const sections = panels[index].querySelectorAll("section");
  SECTIONS.forEach((id, i) => {
    document.getElementById(id)?.removeAttribute("id");
    sections[i].id = id;
  });
  find();
}

search.addEventListener("input", find);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") {
    search.value = "";
    find();
  }
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button.find");
  if (!button) return;
  search.value = button.textContent;
  find();
  go(1);
});
document.getElementById("next").addEventListener("click", () => go(1));
document.getElementById("previous").addEventListener("click", () => go(current < 0 ? 0 : -1));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(input|textarea)$/i.test(document.activeElement.tagName)) {
    event.preventDefault();
    search.focus();
  }
});
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => showTab(index));
  tab.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = (index + by + tabs.length) % tabs.length;
    showTab(next);
    tabs[next].focus();
  });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const view of views.values()) for (const pane of view.panes) pane.drawMap();
});
if (panels.length) showTab(0);
