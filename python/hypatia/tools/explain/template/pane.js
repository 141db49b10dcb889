// One drawn graph: zooming, moving, choosing nodes.

const CLOSEST = 3;
// Nodes are laid out for text of this size.
const TEXT_SIZE = 15;

class Pane {
  constructor(root, side, data, dearest, chosen, moved) {
    this.root = root;
    this.side = side;
    this.svg = root.querySelector("svg");
    this.map = root.querySelector("canvas");
    this.tip = root.querySelector(".tip");
    this.data = data;
    this.dearest = dearest;
    this.chosen = chosen;
    this.moved = moved;
    this.nodes = new Map(data.nodes.map((node) => [node.id, node]));
    this.users = new Map(data.nodes.map((node) => [node.id, []]));
    for (const node of data.nodes) {
      for (const id of new Set(node.inputs)) this.users.get(id)?.push(node.id);
    }
    this.pointers = new Map();
    this.draw("flow");
    this.listen();
    new ResizeObserver(() => this.resized()).observe(this.svg);
  }

  draw(form) {
    const { width, height, nodes, edges, bands } = (this.drawn = this.data[form]);
    this.places = new Map(nodes.map((place) => [place[0], place]));
    this.view = shape("g", {});
    bands.forEach((band, i) => this.view.append(drawBand(band, i, width)));
    this.edges = edges.map((edge) => {
      const line = shape("path", { class: "edge", d: path(edge) }, this.view);
      return { from: edge[0], to: edge[1], line };
    });
    this.elements = new Map();
    for (const place of nodes) {
      const node = this.nodes.get(place[0]);
      const hidden = node.inputs.filter((id) => !this.places.has(id)).map((id) => this.nodes.get(id));
      const drawn = drawNode(node, place, this.side, this.dearest, hidden.filter(Boolean));
      this.elements.set(node.id, drawn);
      this.view.append(drawn);
    }
    this.svg.replaceChildren(this.view);
    this.size = { width: Math.max(1, width), height: Math.max(1, height) };
    this.selected = null;
    this.svg.classList.remove("chosen");
  }

  get room() {
    return { width: this.svg.clientWidth - this.map.clientWidth, height: this.svg.clientHeight };
  }

  get farthest() {
    const { width, height } = this.room;
    return Math.min(1, (width - 24) / (this.size.width + 88), (height - 24) / this.size.height);
  }

  // A readable part: the whole width if it can be read, from the top.
  start() {
    const wide = (this.room.width - 16) / (this.size.width + 88);
    const readable = parseFloat(getComputedStyle(this.root).fontSize) / TEXT_SIZE;
    this.scale = Math.min(readable, Math.max(0.6 * readable, wide));
    this.y = 16;
    // Of a graph that is wider than its room, the middle of what is in sight.
    const seen = [...this.places.values()].filter((place) => place[2] * this.scale < this.room.height);
    const middle =
      this.size.width * this.scale <= this.room.width
        ? this.size.width / 2
        : seen.reduce((sum, place) => sum + place[1], 0) / Math.max(1, seen.length);
    this.x = this.room.width / 2 - middle * this.scale;
    this.show();
  }

  fit() {
    this.scale = this.farthest;
    this.x = (this.room.width - this.size.width * this.scale) / 2;
    this.y = (this.room.height - this.size.height * this.scale) / 2;
    this.show();
  }

  resized() {
    if (!this.svg.clientWidth) return;
    this.map.classList.toggle("whole", this.farthest === 1);
    this.map.width = this.map.clientWidth * devicePixelRatio;
    this.map.height = this.map.clientHeight * devicePixelRatio;
    if (this.scale === undefined) this.start();
    else this.show();
  }

  zoom(factor, at = { x: this.room.width / 2, y: this.room.height / 2 }) {
    const scale = Math.min(CLOSEST, Math.max(this.farthest, this.scale * factor));
    this.x = at.x - (at.x - this.x) * (scale / this.scale);
    this.y = at.y - (at.y - this.y) * (scale / this.scale);
    this.scale = scale;
    this.show();
  }

  move(x, y) {
    this.x += x;
    this.y += y;
    this.show();
  }

  centre(id) {
    const place = this.places.get(id);
    if (!place) return;
    this.scale = Math.max(this.scale, 0.75);
    this.x = this.room.width / 2 - place[1] * this.scale;
    this.y = this.room.height / 2 - (place[2] + NODE_HEIGHT / 2) * this.scale;
    this.show();
  }

  toBand(number) {
    const band = this.drawn.bands[number];
    if (!band) return;
    this.y = 24 - band[0] * this.scale;
    this.show();
  }

  get band() {
    const middle = (this.room.height / 3 - this.y) / this.scale;
    return this.drawn.bands.findLastIndex(([top]) => top <= middle);
  }

  // Some of the graph always stays in sight.
  show() {
    const { width, height } = this.room;
    const keep = 60;
    this.x = Math.min(width - keep, Math.max(keep - this.size.width * this.scale, this.x));
    this.y = Math.min(height - keep, Math.max(keep - this.size.height * this.scale, this.y));
    this.view.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
    this.svg.classList.toggle("far", this.scale < 0.42);
    this.root.dataset.scale = this.scale.toFixed(3);
    this.drawMap();
    this.moved(this);
  }

  get mapScale() {
    const [width, height] = [this.map.clientWidth, this.map.clientHeight];
    return { x: (width - 12) / this.size.width, y: Math.min(1, (height - 12) / this.size.height) };
  }

  drawMap() {
    const context = this.map.getContext("2d");
    const style = getComputedStyle(this.root);
    const colour = (name) => style.getPropertyValue(name);
    const colours = { fused: "--fused", folded: "--folded", opaque: "--opaque", input: "--input", result: "--input" };
    const { x, y } = this.mapScale;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 6 * devicePixelRatio, 6 * devicePixelRatio);
    context.clearRect(-6, -6, this.map.width, this.map.height);
    for (const [id, place] of this.places) {
      const node = this.nodes.get(id);
      const marked = this.elements.get(id).classList.contains("hit");
      context.fillStyle = colour(marked || this.selected === id ? "--up" : colours[node.kind] || "--edge");
      const [, nodeX, nodeY, width] = place;
      context.fillRect((nodeX - width / 2) * x, nodeY * y, width * x, Math.max(marked ? 2 : 1, NODE_HEIGHT * y));
    }
    const top = (-this.y / this.scale) * y;
    const tall = (this.room.height / this.scale) * y;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(-4, Math.max(-4, top), this.map.clientWidth - 5, Math.max(4, tall));
  }

  select(id, { quiet = false, centre = false } = {}) {
    this.selected = id;
    this.svg.classList.toggle("chosen", id !== null);
    const from = new Set(id === null ? [] : this.nodes.get(id).inputs);
    const to = new Set(id === null ? [] : this.users.get(id));
    for (const [other, drawn] of this.elements) {
      drawn.classList.toggle("self", other === id);
      drawn.classList.toggle("from", from.has(other));
      drawn.classList.toggle("to", to.has(other));
    }
    for (const edge of this.edges) {
      edge.line.classList.toggle("from", edge.to === id);
      edge.line.classList.toggle("to", edge.from === id);
    }
    if (centre) this.centre(id);
    else this.drawMap();
    if (!quiet) this.chosen(this, id);
  }

  // The nodes of a group: what was replaced on one side, or replaces it on the other.
  peers(group) {
    return [...this.elements.keys()].filter((id) => group >= 0 && this.nodes.get(id).group === group);
  }

  mark(group) {
    const peers = new Set(this.peers(group));
    for (const [id, drawn] of this.elements) drawn.classList.toggle("peer", peers.has(id));
    if (peers.size) this.svg.classList.add("chosen");
  }

  // Nodes that match, in reading order; null: no search.
  find(matches) {
    const found = [];
    this.svg.classList.toggle("finding", matches !== null);
    for (const [id, drawn] of this.elements) {
      const hit = matches !== null && matches(this.nodes.get(id));
      drawn.classList.toggle("hit", hit);
      drawn.classList.remove("now");
      if (hit) found.push(id);
    }
    this.drawMap();
    return found.sort((a, b) => this.places.get(a)[2] - this.places.get(b)[2]);
  }

  describe(id, event) {
    const node = id === null ? null : this.nodes.get(id);
    this.tip.hidden = !node;
    if (!node) return;
    const title = element("b", {}, node.op === "input" ? node.called || node.name : node.op);
    this.tip.replaceChildren(title, ` ${node.attrs}`, element("br", {}));
    const about = [node.module || node.name, node.type, node.kind === "folded" ? "folded once" : cost(node.cost)];
    if (!node.kept) about.push(this.side === "before" ? "not computed after" : "new value");
    this.tip.append(about.join(" · "));
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${y + 18 + this.tip.offsetHeight > box.height ? y - this.tip.offsetHeight - 10 : y + 18}px`;
  }

  // Along the edges with up and down, along a layer with left and right.
  walk(key) {
    const at = this.selected;
    if (at === null || !this.places.has(at)) {
      const first = [...this.places.keys()].sort((a, b) => this.places.get(a)[2] - this.places.get(b)[2])[0];
      return first;
    }
    const [, x, y] = this.places.get(at);
    const shown = (ids) => ids.filter((id) => this.places.has(id));
    if (key === "ArrowUp") return shown(this.nodes.get(at).inputs).at(-1);
    if (key === "ArrowDown") return shown(this.users.get(at))[0];
    const sign = key === "ArrowLeft" ? -1 : 1;
    const beside = [...this.places.values()].filter((p) => p[2] === y && sign * (p[1] - x) > 0);
    return beside.sort((a, b) => sign * (a[1] - b[1]))[0]?.[0];
  }

  listen() {
    const idOf = (event) => {
      const group = event.target.closest?.(".node");
      return group ? Number(group.dataset.id) : null;
    };
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    const { svg, map, pointers } = this;
    svg.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, { ...at(event), start: at(event), id: idOf(event) });
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const pointer = pointers.get(event.pointerId);
      if (!pointer) return this.describe(idOf(event), event);
      const now = at(event);
      const other = [...pointers.entries()].find(([id]) => id !== event.pointerId)?.[1];
      if (other) {
        const spread = (p) => Math.hypot(p.x - other.x, p.y - other.y) || 1;
        this.zoom(spread(now) / spread(pointer), { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 });
        pointer.moved = other.moved = true;
      } else if (pointer.moved || Math.hypot(now.x - pointer.start.x, now.y - pointer.start.y) > 4) {
        pointer.moved = true;
        svg.classList.add("dragging");
        this.tip.hidden = true;
        this.move(now.x - pointer.x, now.y - pointer.y);
      }
      Object.assign(pointer, now);
    });
    const release = (event) => {
      const pointer = pointers.get(event.pointerId);
      pointers.delete(event.pointerId);
      svg.classList.remove("dragging");
      if (pointer && !pointer.moved && event.type === "pointerup") this.select(pointer.id);
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("pointerleave", (event) => this.describe(null, event));
    // The wheel scrolls the page until the graph was clicked.
    svg.addEventListener(
      "wheel",
      (event) => {
        if (document.activeElement !== svg && !event.ctrlKey) return;
        event.preventDefault();
        if (event.shiftKey) this.move(0, -event.deltaY || -event.deltaX);
        else this.zoom(Math.exp(-Math.max(-80, Math.min(80, event.deltaY)) / 320), at(event));
      },
      { passive: false },
    );
    svg.addEventListener("keydown", (event) => {
      const keys = { "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8) };
      keys["0"] = () => this.fit();
      keys["1"] = () => this.start();
      keys.Escape = () => this.select(null);
      const walk = () => {
        const id = this.walk(event.key);
        if (id !== undefined) this.select(id, { centre: true });
      };
      for (const key of ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"]) keys[key] = walk;
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    const jump = (event) => {
      if (!event.buttons) return;
      const y = event.clientY - map.getBoundingClientRect().top - 6;
      this.y = this.room.height / 2 - (y / this.mapScale.y) * this.scale;
      this.show();
    };
    map.addEventListener("pointerdown", (event) => {
      map.setPointerCapture(event.pointerId);
      jump(event);
    });
    map.addEventListener("pointermove", jump);
    const actions = { in: () => this.zoom(1.3), out: () => this.zoom(1 / 1.3), fit: () => this.fit(), start: () => this.start() };
    for (const button of this.root.querySelectorAll("[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
  }
}
