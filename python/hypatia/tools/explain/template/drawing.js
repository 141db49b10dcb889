// Elements of a drawn graph. Places come with the page; nothing is laid out here.

const SVG = document.createElement("template");
SVG.innerHTML = "<svg></svg>";
const NAMESPACE = SVG.content.firstChild.namespaceURI;
const NODE_HEIGHT = 34;

function shape(name, attributes, parent) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function cost(microseconds) {
  const [scale, unit] =
    microseconds >= 1e6 ? [1e6, "s"] : microseconds >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const value = microseconds / scale;
  return `${value.toFixed(value >= 1000 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
}

// Straight inside layers, bent between them.
function path([, , x, y, ...points]) {
  let text = `M${x} ${y}`;
  for (let i = 0; i < points.length; i += 2) {
    const [nextX, nextY] = [points[i], points[i + 1]];
    const middle = (y + nextY) / 2;
    text += nextX === x ? `V${nextY}` : `C${x} ${middle} ${nextX} ${middle} ${nextX} ${nextY}`;
    [x, y] = [nextX, nextY];
  }
  return text;
}

function drawNode(node, [, x, y, width], side, dearest, hidden) {
  const kept = node.kept ? "" : side === "before" ? " gone" : " new";
  const group = shape("g", {
    class: `node ${node.kind}${kept}`,
    transform: `translate(${x - width / 2} ${y})`,
    "data-id": node.id,
  });
  const round = node.kind === "input" || node.kind === "result" || node.kind === "weight" ? 9 : 3;
  shape("rect", { class: "box", width, height: NODE_HEIGHT, rx: round }, group);
  shape("text", { x: width / 2, y: 14.5 }, group).textContent = node.label;
  shape("text", { class: "shape", x: width / 2, y: 26.5 }, group).textContent = node.shape;
  const share = dearest ? (width - 8) * (node.cost / dearest) : 0;
  if (share >= 2) {
    shape("rect", { class: "share", x: 4, y: NODE_HEIGHT - 4.5, width: share, height: 2.5 }, group);
  }
  hidden.slice(0, 6).forEach((weight, i) => {
    const kind = weight.kind === "folded" ? "dot folded" : "dot";
    shape("circle", { class: kind, cx: width - 7 - 7 * i, cy: 0, r: 2.6 }, group);
  });
  return group;
}

function drawBand([top, bottom], number, width) {
  const group = shape("g", {});
  const side = 44;
  const box = { x: -side, y: top - 13, width: width + 2 * side, height: bottom - top };
  shape("rect", { class: number % 2 ? "band" : "band odd", ...box }, group);
  shape("text", { class: "band-name", x: -side + 8, y: top + 6 }, group).textContent = number + 1;
  return group;
}
