// Draws the graph of the element #graph: the modules that are open, laid out by dagre, with search and a panel.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("graph").textContent);
  const byId = (id) => document.getElementById(id);
  const picture = byId("picture"), scene = byId("scene"), panel = byId("panel"), query = byId("query");

  // ---- the module tree: an item is a node or a group ----

  const nodes = data.nodes.map((node, i) => ({ ...node, key: `n${i}`, index: i }));
  const groups = data.groups.map((group, i) => ({ ...group, key: `g${i}`, index: i, opened: i === 0, links: new Map() }));
  const root = groups[0];
  const items = new Map([...groups, ...nodes].map((item) => [item.key, item]));
  for (const group of groups) {
    group.children = group.children.map((child) => ("node" in child ? nodes[child.node] : groups[child.group]));
    for (const child of group.children) child.parent = group;
  }

  const isGroup = (item) => "children" in item;
  const chain = (item) => (item.parent ? [...chain(item.parent), item] : [item]);
  const shownFor = (item) => chain(item).find((part) => !(isGroup(part) && part.opened)) ?? item;
  const leaves = (item) => (isGroup(item) ? item.children.flatMap(leaves) : [item]);

  // ---- links: in each group, from child to child, and from and to its border ----

  function link(group, from, to, value) {
    const id = `${from} ${to}`;
    if (!group.links.has(id)) group.links.set(id, { from, to, values: new Set() });
    group.links.get(id).values.add(value);
  }

  for (const node of nodes) Object.assign(node, { inputs: [], outputs: [] });
  for (const [a, b] of data.edges) {
    nodes[a].outputs.push(nodes[b]);
    nodes[b].inputs.push(nodes[a]);
    const up = chain(nodes[a]), down = chain(nodes[b]);
    const apart = up.findIndex((item, i) => item !== down[i]);
    link(up[apart - 1], up[apart].key, down[apart].key, a);
    for (let i = apart; i < up.length - 1; i++) link(up[i], up[i + 1].key, `out${a}`, a);
    for (let i = apart; i < down.length - 1; i++) link(down[i], `in${a}`, down[i + 1].key, a);
  }

  // ---- texts ----

  const pen = document.createElement("canvas").getContext("2d");
  const face = getComputedStyle(document.body).fontFamily;
  function measure(text, size, weight = 400) {
    pen.font = `${weight} ${size}px ${face}`;
    return pen.measureText(text).width;
  }
  function cut(text, width, size, weight) {
    let kept = text.length;
    const shortened = () => (kept < text.length ? `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}` : text);
    while (kept > 4 && measure(shortened(), size, weight) > width) kept--;
    return shortened();
  }

  const inside = (module, group) => (module.startsWith(`${group.module}.`) && group.module ? module.slice(group.module.length + 1) : module);
  let colouring = data.colourings[0];
  const markOf = (item) => colouring[isGroup(item) ? "groups" : "nodes"][item.index];
  const count = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

  // The texts of a closed box: heading, a quiet text beside it, and lines below.
  function textsOf(item) {
    const mark = markOf(item);
    if (!isGroup(item)) {
      const own = item.facts.module && item.facts.module !== item.parent.module ? inside(item.facts.module, item.parent) : "";
      return { head: item.label, beside: own, below: [mark.said || item.facts.rounding || item.type] };
    }
    const each = item.operations / item.children.length;
    const size = item.kind === "layers" ? `${item.children.length} × ${count(each, "operation")}` : count(item.operations, "operation");
    return { head: item.label, beside: item.class, below: [size, ...(mark.said ? [mark.said] : [])] };
  }

  // ---- layout: of each open group by itself ----

  const HEADER = 32, PADDING = 16, WIDEST = 300;

  function closedSize(item) {
    const { head, beside, below } = textsOf(item);
    const first = measure(head, 12.5, 600) + (beside ? measure(beside, 11) + 8 : 0) + (isGroup(item) ? 22 : 0);
    const width = Math.max(first, ...below.map((text) => measure(text, 11))) + 34;
    const strip = item.kind === "layers" ? 12 : 0;
    return { width: Math.min(Math.max(width, 116), WIDEST), height: 30 + 16 * below.length + strip };
  }
  const sizeOf = (item) => (isGroup(item) && item.opened ? layout(item) : closedSize(item));

  function labelOf(item, from, values, told) {
    // A value is named once in a group, where it is made: not at the border through which it enters.
    const source = items.get(from);
    const fresh = [...values].filter((value) => !told.has(value));
    if (!source || (isGroup(source) && source.opened) || !fresh.length) return "";
    fresh.forEach((value) => told.add(value));
    return fresh.length === 1 ? nodes[fresh[0]].value : `${fresh.length} values`;
  }

  function layout(group) {
    if (group.layout) return group.layout;
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 26, edgesep: 14, ranksep: 24 });
    for (const child of group.children) {
      const { width, height, anchor = width / 2 } = sizeOf(child);
      graph.setNode(child.key, { width: 2 * Math.max(anchor, width - anchor), height, anchor });
    }
    const told = new Set(), ports = new Set();
    for (const { from, to, values } of group.links.values()) {
      for (const end of [from, to]) {
        if (!items.has(end) && !graph.hasNode(end)) graph.setNode(end, { width: 6, height: 1 });
        if (!items.has(end)) ports.add(end);
      }
      const label = labelOf(group, from, values, told);
      const size = label ? { width: measure(label, 10.5) + 6, height: 12, labelpos: "r", labeloffset: 5 } : {};
      graph.setEdge(from, to, { label, ...size });
    }
    // Ports are held at the border by edges to a node above, and one below, everything.
    for (const [border, isEnd, prefix] of [["top", (v) => !graph.inEdges(v).length, "in"], ["bottom", (v) => !graph.outEdges(v).length, "out"]]) {
      if (![...ports].some((port) => port.startsWith(prefix))) continue;
      const ends = graph.nodes().filter(isEnd);
      graph.setNode(border, { width: 1, height: 1 });
      for (const end of ends) {
        const pair = prefix === "in" ? [border, end] : [end, border];
        graph.setEdge(...pair, { weight: ports.has(end) ? 60 : 0 });
      }
    }
    dagre.layout(graph);
    return (group.layout = measured(group, graph, ports));
  }

  function measured(group, graph, ports) {
    const boxes = group.children.map((child) => {
      const { x, y, anchor } = graph.node(child.key), { width, height } = sizeOf(child);
      return { child, x: x - anchor + width / 2, y, width, height };
    });
    const edges = [...group.links.values()].map((edge) => ({ ...edge, ...graph.edge(edge.from, edge.to) }));
    const xs = boxes.flatMap(({ x, width }) => [x - width / 2, x + width / 2]);
    const ys = boxes.flatMap(({ y, height }) => [y - height / 2, y + height / 2]);
    for (const { points, label, x, y, width } of edges) {
      for (const point of points.slice(1, -1)) xs.push(point.x);
      if (label) xs.push(x - width / 2, x + width / 2), ys.push(y - 8, y + 8);
    }
    const title = measure(group.label, 12.5, 600) + measure(group.class, 11) + 60;
    const left = Math.min(...xs) - PADDING, top = Math.min(...ys) - HEADER - (ports.size ? 14 : 4);
    const width = Math.max(Math.max(...xs) - left + PADDING, title), height = Math.max(...ys) - top + PADDING + (ports.size ? 10 : 0);
    const centre = (width - (Math.max(...xs) - left + PADDING)) / 2;
    const moved = (x, y) => ({ x: x - left + centre, y: y - top });
    const places = new Map(boxes.map(({ child, x, y }) => [child.key, moved(x, y)]));
    for (const port of ports) places.set(port, { x: moved(graph.node(port).x, 0).x, y: port.startsWith("in") ? 0 : height });
    const routes = edges.map(({ points, x, y, ...edge }) => ({
      ...edge, points: points.slice(1, -1).map((point) => moved(point.x, point.y)), at: edge.label ? moved(x - edge.width / 2 + 6, y + 4) : null,
    }));
    return { width, height, places, routes, anchor: anchorOf(ports, places, width) };
  }

  // The x at which an open group is put below and above its neighbours: its first port, if that is near its middle.
  function anchorOf(ports, places, width) {
    const [first] = ports;
    const x = first ? places.get(first).x : width / 2;
    return Math.max(x, width - x) < 0.75 * width ? x : width / 2;
  }

  // ---- drawing ----

  const SVG = picture.namespaceURI;
  function draw(parent, name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  let found = new Set(), visible = [], selected = null;

  function redraw() {
    scene.replaceChildren();
    visible = [];
    const { width, height } = layout(root);
    Object.assign(root, { x: 0, y: 0, width, height });
    drawInside(root);
    picture.classList.toggle("searching", found.size > 0);
    highlight();
  }

  function drawInside(group) {
    const { places, routes } = layout(group);
    for (const child of group.children) {
      const { width, height } = sizeOf(child), { x, y } = places.get(child.key);
      Object.assign(child, { x: group.x + x - width / 2, y: group.y + y - height / 2, width, height });
    }
    const opened = group.children.filter((child) => isGroup(child) && child.opened);
    const frames = new Map(opened.map((child) => [child, drawFrame(child)]));
    for (const route of routes) drawRoute(group, route);
    for (const child of group.children) drawBox(child, frames.get(child));
    opened.forEach(drawInside);
  }

  // Where the edge of a value leaves or enters an end of a route: a port of an open group, or the middle of a box.
  function endOf(group, end, value, side) {
    const item = items.get(end);
    if (!item) return { x: group.x + layout(group).places.get(end).x, y: group.y + layout(group).places.get(end).y };
    const y = side === "out" ? item.y + item.height : item.y;
    const port = isGroup(item) && item.opened && layout(item).places.get(`${side}${value}`);
    return { x: port ? item.x + port.x : item.x + item.width / 2, y };
  }

  function drawRoute(group, { from, to, values, points, label, at }) {
    const middle = points.map(({ x, y }) => ({ x: group.x + x, y: group.y + y }));
    const drawn = new Set();
    for (const value of values) {
      const way = [endOf(group, from, value, "out"), ...middle, endOf(group, to, value, "in")];
      let path = `M${way[0].x.toFixed(1)} ${way[0].y.toFixed(1)}`;
      for (let i = 1; i < way.length; i++) {
        const [a, b] = [way[i - 1], way[i]], half = ((a.y + b.y) / 2).toFixed(1);
        path += `C${a.x.toFixed(1)} ${half} ${b.x.toFixed(1)} ${half} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`;
      }
      if (drawn.has(path)) continue;
      drawn.add(path);
      const target = items.get(to);
      const enters = !target || (isGroup(target) && target.opened);
      const edge = draw(scene, "path", { class: `edge${enters ? " port" : ""}`, d: path });
      edge.ends = [from, to, value];
      draw(edge, "title", {}, [...values].map((v) => `${nodes[v].name}: ${nodes[v].value}`).join("\n"));
    }
    if (label) draw(scene, "text", { class: "edge", x: group.x + at.x, y: group.y + at.y }, label);
  }

  // The frame of an open group is below the edges that cross it, and its heading above them.
  function drawFrame(item) {
    const frame = draw(scene, "rect", { class: "frame", x: item.x, y: item.y, width: item.width, height: item.height, rx: 9 });
    frame.style.setProperty("--stroke", markOf(item).stroke);
    onClick(frame, () => select(item));
    return frame;
  }

  function onClick(shape, action) {
    shape.addEventListener("click", (event) => {
      event.stopPropagation();
      if (moved) return;
      picture.focus({ preventScroll: true });
      action();
    });
  }

  function drawBox(item, frame) {
    const mark = markOf(item), open = Boolean(frame), { x, y, width } = item, height = open ? HEADER : item.height;
    const box = draw(scene, "g", { class: `item${open ? " opened" : ""}`, id: item.key, role: "button" });
    box.frame = frame;
    box.style.setProperty("--fill", mark.fill);
    box.style.setProperty("--stroke", mark.stroke);
    if (isGroup(item)) box.setAttribute("aria-expanded", open);
    const { head, beside, below } = textsOf(item);
    box.setAttribute("aria-label", [head, beside, ...below].filter(Boolean).join(", "));
    onClick(box, () => {
      select(item);
      if (isGroup(item)) toggle(item);
    });
    const hits = open ? 0 : leaves(item).filter((leaf) => found.has(leaf)).length;
    box.classList.toggle("found", hits > 0);
    const shape = { x, y, width, height, rx: isGroup(item) ? 9 : 7 };
    if (item.kind === "layers" && !open) for (const step of [6, 3]) draw(box, "rect", { ...shape, class: "behind", x: x + step, y: y + step });
    draw(box, "rect", { ...shape, class: "box" });
    draw(box, "title", {}, [item.facts?.module ?? item.module, item.facts?.source, item.facts?.code].filter(Boolean).join("\n"));
    if (mark.stripe && !open) draw(box, "rect", { x: x + 4, y: y + 5, width: 4, height: height - 10, rx: 2, fill: mark.stripe });
    const room = width - 30 - (isGroup(item) ? 20 : 0);
    const name = draw(box, "text", { class: "head", x: x + 15, y: y + 20 }, cut(head, room, 12.5, 600));
    const rest = room - measure(name.textContent, 12.5, 600) - 8;
    if (beside && rest > 20) draw(name, "tspan", { class: "small", dx: 7 }, cut(beside, rest, 11));
    if (isGroup(item)) draw(box, "text", { class: "sign", x: x + width - 20, y: y + 20 }, open ? "−" : "+");
    visible.push(item);
    if (open) return;
    below.forEach((line, i) => draw(box, "text", { class: "small", x: x + 15, y: y + 36 + 16 * i }, cut(line, width - 26, 11)));
    if (item.kind === "layers") drawStrip(box, item);
    if (isGroup(item) && hits) drawBadge(box, item, hits);
  }

  // One segment for each of equal layers, in the layer's own colour.
  function drawStrip(box, item) {
    const step = (item.width - 30) / item.children.length;
    item.children.forEach((layer, i) => {
      const { fill, stroke } = markOf(layer);
      const segment = draw(box, "rect", { x: item.x + 15 + i * step, y: item.y + item.height - 15, width: Math.max(step - 2, 1), height: 7, rx: 2 });
      segment.style.fill = stroke;
      segment.style.fillOpacity = fill === stroke ? 1 : 0.75;
    });
  }

  function drawBadge(box, item, hits) {
    const badge = draw(box, "g", { class: "badge" }), width = 12 + 7 * String(hits).length;
    draw(badge, "rect", { x: item.x + item.width - width, y: item.y - 9, width, height: 17, rx: 8 });
    draw(badge, "text", { x: item.x + item.width - width / 2, y: item.y + 3.5 }, hits);
  }

  function highlight() {
    for (const box of scene.querySelectorAll(".item")) {
      box.classList.toggle("selected", box.id === selected?.key);
      box.frame?.classList.toggle("selected", box.id === selected?.key);
    }
    const mine = new Set(selected && !(isGroup(selected) && selected.opened) ? leaves(selected).map((leaf) => leaf.index) : []);
    const users = new Set(data.edges.filter(([, to]) => mine.has(to)).map(([from]) => from));
    for (const edge of scene.querySelectorAll("path.edge")) {
      const [from, to, value] = edge.ends;
      edge.classList.toggle("near", mine.has(value) || (users.has(value) && (to === selected?.key || chain(selected).some((part) => part.key === to))));
    }
    if (selected) picture.setAttribute("aria-activedescendant", selected.key);
    else picture.removeAttribute("aria-activedescendant");
  }

  // ---- opening and closing ----

  function forget(group) {
    for (const part of chain(group)) part.layout = null;
  }

  function setOpened(group, opened) {
    if (group === root || group.opened === opened) return;
    group.opened = opened;
    forget(group);
  }

  function toggle(group) {
    if (group === root) return;
    const before = { x: group.x + group.width / 2, y: group.y };
    setOpened(group, !group.opened);
    redraw();
    // The heading stays at the height at which it was clicked; what is wider than the picture begins at its left edge.
    view.x += (before.x - group.x - group.width / 2) * view.scale;
    view.y += (before.y - group.y) * view.scale;
    const left = view.x + group.x * view.scale, right = left + group.width * view.scale;
    if (left < 12) view.x += 12 - left;
    else if (right > picture.clientWidth) view.x -= Math.min(right - picture.clientWidth, left) - 12;
    look();
  }

  function reveal(item) {
    for (const part of chain(item).slice(0, -1)) setOpened(part, true);
    redraw();
    select(item);
    centre(item);
  }

  function setAll(opened) {
    groups.forEach((group) => setOpened(group, opened));
    if (selected) selected = shownFor(selected);
    redraw();
    fit();
  }

  // ---- looking: position and zoom ----

  const view = { x: 0, y: 0, scale: 1 };
  const LEAST = 0.04, MOST = 4;
  function look() {
    scene.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
  }
  function zoom(factor, x = picture.clientWidth / 2, y = picture.clientHeight / 2) {
    const scale = Math.min(Math.max(view.scale * factor, LEAST), MOST);
    view.x = x - ((x - view.x) * scale) / view.scale;
    view.y = y - ((y - view.y) * scale) / view.scale;
    view.scale = scale;
    look();
  }
  function fit() {
    const w = picture.clientWidth, h = picture.clientHeight - byId("legend").offsetHeight - 12;
    view.scale = Math.min(Math.max(Math.min((w - 32) / root.width, (h - 32) / root.height), LEAST), 1.15);
    view.x = (w - root.width * view.scale) / 2;
    view.y = Math.max((h - root.height * view.scale) / 2, 8 - HEADER * view.scale);
    look();
  }
  function centre(item) {
    view.scale = Math.max(view.scale, 0.75);
    view.x = picture.clientWidth / 2 - (item.x + item.width / 2) * view.scale;
    view.y = picture.clientHeight / 2 - (item.y + Math.min(item.height, 200) / 2) * view.scale;
    look();
  }
  function keepInSight(item) {
    const x = view.x + item.x * view.scale, y = view.y + item.y * view.scale;
    const right = x + item.width * view.scale, bottom = y + Math.min(item.height * view.scale, 120);
    if (x < 0 || y < 0 || right > picture.clientWidth || bottom > picture.clientHeight) centre(item);
  }

  let drag = null, moved = false;
  picture.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX - view.x, y: event.clientY - view.y, from: [event.clientX, event.clientY] };
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!drag) return;
    moved ||= Math.hypot(event.clientX - drag.from[0], event.clientY - drag.from[1]) > 4;
    if (!moved) return;
    view.x = event.clientX - drag.x;
    view.y = event.clientY - drag.y;
    look();
  });
  addEventListener("pointerup", () => (drag = null));
  picture.addEventListener("click", () => moved || select(null));
  // In a page that scrolls, the wheel zooms with Ctrl alone.
  const framed = window !== window.top;
  picture.addEventListener("wheel", (event) => {
    if (framed && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { left, top } = picture.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - left, event.clientY - top);
  }, { passive: false });

  // ---- the panel ----

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }
  function facts(pairs) {
    const list = element("dl");
    for (const [key, value] of pairs) if (value !== "" && value !== undefined) list.append(element("dt", {}, key), element("dd", {}, String(value)));
    return list;
  }
  function listed(title, others) {
    if (!others.length) return [];
    const rows = others.map((item) => {
      const button = element("button", { onclick: () => (reveal(item), picture.focus()) }, item.label);
      button.append(element("span", {}, [item.name ?? count(item.operations, "operation"), item.facts?.module, item.value].filter(Boolean).join(" · ")));
      return element("li", {}, button);
    });
    return [element("h3", {}, title), element("ul", {}, ...rows)];
  }
  const marks = (item) => data.colourings.flatMap(({ name, ...marked }) => {
    const { said, facts: more } = marked[isGroup(item) ? "groups" : "nodes"][item.index];
    return Object.keys(more).length ? Object.entries(more) : said ? [[name, said]] : [];
  });

  function tell(item) {
    panel.replaceChildren();
    panel.scrollTop = 0;
    if (!item) return overview();
    panel.append(element("h2", {}, item.label));
    if (isGroup(item)) {
      panel.append(element("p", {}, [item.class, item.kind === "layers" ? `${item.children.length} equal layers` : item.module].filter(Boolean).join(" · ")));
      const roundings = new Map();
      for (const { facts: { rounding } } of leaves(item)) if (rounding) roundings.set(rounding, (roundings.get(rounding) ?? 0) + 1);
      const total = leaves(item).reduce((sum, leaf) => sum + (leaf.facts.operations ?? 0), 0);
      panel.append(facts([["operations", item.operations], ["arithmetic operations", total.toLocaleString("en")], ...marks(item)]));
      panel.append(element("h3", {}, "Roundings"), facts([...roundings].sort((a, b) => b[1] - a[1])));
      panel.append(...listed("Inside", item.children));
      return;
    }
    const { code, operations, ...rest } = item.facts;
    const said = Object.entries(rest).map(([key, value]) => [key, key === "module" && item.kind === "operation" ? `${value || "(root)"}${item.class ? ` (${item.class})` : ""}` : value]);
    if (code) panel.append(element("code", {}, code));
    panel.append(facts([["node", item.name], ...said, ["arithmetic operations", operations?.toLocaleString("en")], ["type", item.type], ["value", item.value], ...marks(item)]));
    if (item.reads.length) panel.append(element("h3", {}, "Reads"), ...item.reads.map((text) => element("p", {}, text)));
    panel.append(...listed("From", item.inputs), ...listed("To", item.outputs));
  }

  const KEYS = [["↑ ↓ ← →", "select the next box"], ["Enter", "open or close a module"], ["Esc", "the module around"], ["/", "search"], ["+ − 0", "zoom, show all"]];
  function overview() {
    panel.append(element("h2", {}, data.title));
    panel.append(element("p", {}, `${count(root.operations, "operation")}. Click a module to open or close it, an operation to see how it is rounded; drag to move, turn the wheel${framed ? " with Ctrl" : ""} to zoom.`));
    const list = element("dl");
    for (const [keys, said] of KEYS) list.append(element("dt", {}, ...keys.split(" ").map((key) => (key === "the" ? key : element("kbd", {}, key)))), element("dd", {}, said));
    panel.append(element("h3", {}, "Keys"), list, element("h3", {}, colouring.title), facts(marks(root)));
  }

  function select(item) {
    selected = item === root ? null : item;
    highlight();
    tell(selected);
  }

  // ---- search ----

  const key = (text) => text.toLowerCase();
  for (const item of items.values()) {
    const { facts: told = {} } = item;
    item.words = key([item.label, item.name, item.module, item.class, item.value, told.operator, told.module, told.source, told.code, told.rounding, told.accumulate].filter(Boolean).join("\n"));
  }
  const LISTED = 100;
  let matches = [], position = -1;

  function search() {
    const words = key(query.value).split(/\s+/).filter(Boolean);
    const fits = (item) => item !== root && words.every((word) => item.words.includes(word));
    matches = words.length ? [...groups.filter(fits), ...nodes.filter(fits)] : [];
    found = new Set(words.length ? nodes.filter(fits) : []);
    position = -1;
    byId("count").textContent = words.length ? `${found.size.toLocaleString("en")} of ${nodes.length.toLocaleString("en")}` : "";
    const list = byId("results");
    list.hidden = !matches.length;
    list.replaceChildren(...matches.slice(0, LISTED).map((item, i) => {
      const where = isGroup(item) ? [item.module, item.class] : [item.name, item.facts.module, item.facts.source, item.facts.rounding];
      return element("li", { role: "option", id: `result${i}`, onclick: () => go(i) }, item.label, element("span", {}, where.filter(Boolean).join(" · ")));
    }));
    redraw();
  }
  function go(i) {
    position = (i + matches.length) % matches.length;
    reveal(matches[position]);
    const list = byId("results");
    [...list.children].forEach((row, j) => row.setAttribute("aria-selected", j === position));
    list.children[position]?.scrollIntoView({ block: "nearest" });
    byId("count").textContent = `${position + 1} of ${matches.length.toLocaleString("en")}`;
  }
  query.addEventListener("input", search);
  query.addEventListener("focus", () => (byId("results").hidden = !matches.length));
  query.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      query.value = "";
      search();
      picture.focus();
    } else if (matches.length && ["Enter", "ArrowDown", "ArrowUp"].includes(event.key)) {
      event.preventDefault();
      go(position + (event.key === "ArrowUp" || event.shiftKey ? -1 : 1));
    }
  });
  addEventListener("pointerdown", (event) => byId("find").contains(event.target) || (byId("results").hidden = true));

  // ---- keyboard ----

  // The next box in a direction: the nearest of those that an edge leads to, upwards and downwards, else of all.
  function next(direction) {
    if (!selected) return visible.toSorted((a, b) => a.y - b.y || a.x - b.x)[0];
    const [across, along] = direction === "ArrowLeft" || direction === "ArrowRight" ? ["y", "x"] : ["x", "y"];
    const sign = direction === "ArrowRight" || direction === "ArrowDown" ? 1 : -1;
    const middle = (item) => ({ x: item.x + item.width / 2, y: item.y + (isGroup(item) && item.opened ? HEADER / 2 : item.height / 2) });
    const here = middle(selected);
    const ahead = visible.filter((item) => item !== selected && sign * (middle(item)[along] - here[along]) > 1);
    const linked = along === "y" ? leaves(selected).flatMap((leaf) => (sign > 0 ? leaf.outputs : leaf.inputs)).map(shownFor) : [];
    const near = ahead.filter((item) => linked.includes(item));
    const distance = (item) => sign * (middle(item)[along] - here[along]) + 2.5 * Math.abs(middle(item)[across] - here[across]);
    return (near.length ? near : ahead).toSorted((a, b) => distance(a) - distance(b))[0];
  }

  const ACTIONS = {
    "/": () => (query.focus(), query.select()),
    "+": () => zoom(1.25),
    "=": () => zoom(1.25),
    "-": () => zoom(0.8),
    "0": fit,
    Escape: () => selected && (select(selected.parent), selected && keepInSight(selected)),
    Enter: () => selected && isGroup(selected) && (toggle(selected), tell(selected), keepInSight(selected)),
  };
  ACTIONS[" "] = ACTIONS.Enter;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const inPicture = event.target === picture || event.target === document.body;
    if (event.key.startsWith("Arrow") && inPicture) {
      const item = next(event.key);
      if (item) select(item), keepInSight(item);
    } else if (event.key in ACTIONS && (inPicture || !["Enter", " "].includes(event.key))) {
      ACTIONS[event.key]();
    } else return;
    event.preventDefault();
  });

  // ---- controls and legend ----

  function paint() {
    const legend = byId("legend");
    legend.replaceChildren(element("b", {}, colouring.title));
    for (const { label, fill, stroke } of colouring.legend) {
      const chip = element("i", { className: "chip" });
      chip.style.setProperty("--fill", fill);
      chip.style.setProperty("--stroke", stroke);
      legend.append(element("span", {}, chip, label));
    }
  }
  const menu = byId("colour").querySelector("select");
  menu.append(...data.colourings.map(({ name }, i) => element("option", { value: i }, name)));
  menu.addEventListener("change", () => {
    colouring = data.colourings[menu.value];
    groups.forEach((group) => (group.layout = null));
    paint();
    redraw();
    tell(selected);
  });
  byId("colour").hidden = data.colourings.length < 2;
  for (const [id, action] of Object.entries({ open: () => setAll(true), close: () => setAll(false), in: () => zoom(1.25), out: () => zoom(0.8), fit })) {
    byId(id).addEventListener("click", action);
  }
  addEventListener("resize", () => look());

  // ---- start: small graphs are open; of large ones, the module that most operations are in, down to equal layers ----

  const SMALL = 40;
  function openFirst(group) {
    for (const child of group.children.filter(isGroup)) {
      if (nodes.length > SMALL && (child.kind === "layers" || child.operations * 2 < root.operations)) continue;
      setOpened(child, true);
      openFirst(child);
    }
  }
  openFirst(root);
  byId("colour").parentElement.querySelector("h1").textContent = data.title;
  paint();
  redraw();
  fit();
  tell(null);
})();
