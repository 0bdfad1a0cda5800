// Draws the models of distgemm.viz.explorer. All that it shows is in the model; this file finds what holds at a time.
"use strict";

const PALETTE = ["#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"];
const SYMBOLS = {
  absent: "",
  coming: "\u2192",
  held: "\u25CF",
  busy: "\u00D7",
  partial: "",
  sent: "\u2197",
  done: "\u2713",
};
const KIND_COLOURS = { Gemm: "--gemm", Copy: "--copy", Reduce: "--sum", LocalCopy: "--local" };
const KIND_NAMES = { Gemm: "GEMM", Copy: "copy between ranks", Reduce: "sum", LocalCopy: "copy within a rank" };
const DOES = {
  Gemm: "multiplies",
  Copy: "copies",
  Reduce: "adds",
  LocalCopy: "copies within itself",
  Signal: "sets",
  Wait: "waits for",
  Barrier: "meets all ranks",
};
const PLAY_SECONDS = 20;
const SVG = "http://www.w3.org/2000/svg";

const svgNode = (parent, name, attributes = {}) => {
  const node = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
const html = (parent, name, attributes = {}, text = "") => {
  const node = parent.appendChild(document.createElement(name));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
};
const rankColour = (rank, ranks) =>
  ranks <= PALETTE.length ? PALETTE[rank] : d3.interpolateViridis(0.25 + (0.75 * rank) / Math.max(1, ranks - 1));
const inkOn = (colour) => {
  const { r, g, b } = d3.rgb(colour);
  return 0.299 * r + 0.587 * g + 0.114 * b < 120 ? "#ffffff" : "#111111";
};
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// --- one plan --------------------------------------------------------------------------------------------

class View {
  constructor(root, model, player) {
    Object.assign(this, { root, model, player });
    this.track = 0;
    this.at = 0;
    this.picked = null; // {tile, rank}, {rank} or {op: [rank, id]}
    this.zoom = d3.zoomIdentity;
    this.byId = model.ops.map((ops) => new Map(ops.map((op, index) => [op.id, index])));
    this.onTile = new Map();
    model.ops.forEach((ops, rank) =>
      ops.forEach((op, index) => {
        for (const tile of op.tiles) {
          if (!this.onTile.has(tile)) this.onTile.set(tile, []);
          this.onTile.get(tile).push([rank, index]);
        }
      }),
    );
    this.colours = d3.range(model.ranks).map((rank) => rankColour(rank, model.ranks));
    this.number = View.counter = (View.counter || 0) + 1;
    this.build();
  }

  // What holds now.
  get times() {
    return this.model.tracks[this.track].times;
  }
  get unit() {
    return this.model.tracks[this.track].unit;
  }
  get begin() {
    return this.model.tracks[this.track].begin;
  }
  get end() {
    return this.model.tracks[this.track].end;
  }
  op(rank, id) {
    return this.model.ops[rank][this.byId[rank].get(id)];
  }
  time(rank, id) {
    return this.times[rank][this.byId[rank].get(id)];
  }
  text(time) {
    return this.unit === "us" ? `${time.toFixed(1)} \u00B5s` : `step ${+time.toFixed(2)}`;
  }

  build() {
    const { root, model } = this;
    root.className = "view";
    const head = html(root, "header");
    html(head, "h1", {}, model.label && model.label.title ? `${model.label.title}: ${model.schedule}` : model.schedule);
    const mesh = model.mesh.length > 1 ? ` as ${model.mesh.join("x")}` : "";
    html(
      head,
      "p",
      {},
      `${model.problem}; ${model.ranks} rank${model.ranks > 1 ? "s" : ""}${mesh}, ${model.iterations} iterations; ${model.moved} moves between ranks (${model.mechanism}, workspace ${model.workspace}, sync ${model.sync}).`,
    );
    this.about = html(head, "p", { class: "about" });
    if (model.failure) {
      const box = html(head, "div", { class: "failure", role: "alert" });
      html(box, "strong", {}, "The proof fails: ");
      box.append(model.failure.message);
    } else {
      html(
        head,
        "p",
        { class: "proof" },
        "\u2713 Proved: each tile of D is right in every legal order of the ops, in every replay.",
      );
    }
    const panels = html(root, "div", { class: "panels" });
    const left = html(panels, "section", { class: "panel", "aria-label": "tile grids" });
    this.buildGrids(left);
    const right = html(panels, "section", { class: "panel", "aria-label": "ranks" });
    this.buildRanks(right);
    const below = html(root, "section", { class: "panel timeline", "aria-label": "timeline" });
    this.buildTimeline(below);
    this.details = html(root, "section", { class: "panel details", "aria-label": "history" });
    this.setTrack(0);
  }

  setTrack(track) {
    this.track = track;
    this.about.textContent = this.model.tracks[track].about;
    this.moving = [];
    this.bounds = new Set([this.begin, this.end]);
    this.times.forEach((times, rank) =>
      times.forEach((time, index) => {
        const op = this.model.ops[rank][index];
        if (!time || !KIND_COLOURS[op.kind]) return;
        this.moving.push({ rank, index, op, start: time[1], end: op.link ? time[3] : time[2] });
        this.bounds.add(time[1]).add(op.link ? time[3] : time[2]);
      }),
    );
    this.moving.sort((one, other) => one.start - other.start);
    this.movingOf = this.model.ops.map(() => []);
    for (const each of this.moving) this.movingOf[each.rank].push(each);
    this.bounds = [...this.bounds].sort(d3.ascending);
    this.pips.forEach((pip) => {
      pip.step = -1;
    });
    this.drawTimeline();
    this.show(this.at);
    this.showDetails();
  }

  // Grids: a cell for each tile, in it a pip for each rank that ever has or uses the tile.
  buildGrids(parent) {
    const { model } = this;
    html(parent, "h2", {}, "Tiles");
    html(
      parent,
      "p",
      { class: "faint" },
      "Each box is what one rank has of a tile, in the colour of the rank. Select a box for its history.",
    );
    const holder = html(parent, "div", { class: "grids" });
    this.pips = [];
    const room = Math.max(240, Math.min(parent.clientWidth - 40, 760));
    for (const { operand, modes, shape } of model.grids) {
      const [rows, columns, batches] = shape;
      for (let batch = 0; batch < batches; batch++) {
        const places = model.places.filter(
          ({ tile }) => tile[0] === operand && +tile.slice(2, -1).split(",")[2] === batch,
        );
        const cells = d3
          .nest()
          .key(({ tile }) => tile)
          .entries(places);
        const most = d3.max(cells, ({ values }) => values.length) || 1;
        const across =
          columns === 1
            ? most
            : Math.min(most, Math.max(1, Math.floor(24 / columns)), Math.ceil(Math.sqrt(most)) + (most <= 4 ? 2 : 0));
        const down = Math.ceil(most / across);
        const width = Math.max(
          5,
          Math.min(
            rows * down > 44 ? 22 : 36,
            Math.floor((room * (columns * across > 24 ? 0.85 : 0.42)) / (columns * across)),
          ),
        );
        const height = Math.max(4, Math.min(28, Math.floor(440 / (rows * down))));
        const small = width < 12 || height < 10;
        const cellWidth = across * width + (width > 10 ? 4 : 1),
          cellHeight = down * height + (height > 10 ? 4 : 0);
        const box = html(holder, "div", { class: "grid" });
        const where = batches > 1 ? `, ${modes[2]} ${batch}` : "";
        html(box, "h3", {}, `${operand} (${modes[0]} \u00D7 ${modes[1]})${where}`);
        const scroll = html(box, "div", { class: "scroll" });
        const side = 38,
          top = 16;
        const svg = svgNode(scroll, "svg", {
          class: small ? "small" : "",
          width: side + columns * cellWidth + 4,
          height: top + rows * cellHeight + 4,
          tabindex: 0,
          role: "listbox",
          "aria-label": `tiles of ${operand}${where}; arrow keys move, Enter selects`,
        });
        const everyRow = Math.ceil(13 / cellHeight),
          everyColumn = Math.ceil(30 / cellWidth);
        for (let row = 0; row < rows; row += everyRow)
          svgNode(svg, "text", {
            class: "label",
            x: 2,
            y: top + row * cellHeight + Math.min(cellHeight / 2 + 4, 12),
          }).textContent = `${modes[0]} ${row}`;
        for (let column = 0; column * cellWidth < Math.max(1, columns * cellWidth - 22); column += everyColumn)
          svgNode(svg, "text", { class: "label", x: side + column * cellWidth, y: 11 }).textContent =
            `${modes[1]} ${column}`;
        const own = [];
        for (const { key: tile, values: each } of cells) {
          const [row, column] = tile.slice(2, -1).split(",").map(Number);
          each.forEach((place, number) => {
            const x = side + column * cellWidth + (number % across) * width,
              y = top + row * cellHeight + Math.floor(number / across) * height;
            const node = svgNode(svg, "g", {
              class: `pip${place.owner ? " owner" : ""}`,
              id: `pip-${this.number}-${this.pips.length}`,
              role: "option",
              "data-tile": tile,
              "data-rank": place.rank,
              transform: `translate(${x},${y})`,
            });
            svgNode(node, "rect", { width: width - 1, height: height - (height > 5 ? 1 : 0.5), rx: small ? 0 : 3 });
            const label =
              width >= 12 && height >= 12 ? svgNode(node, "text", { x: (width - 1) / 2, y: height / 2 }) : null;
            const pip = { ...place, node, label, step: -1, x, y, width, wide: width >= 24 };
            node.addEventListener("click", () => this.pick({ tile, rank: place.rank }));
            own.push(pip);
            this.pips.push(pip);
          });
        }
        this.keysOfGrid(svg, own);
      }
    }
    const legend = html(parent, "ul", { class: "legend" });
    for (const text of [
      "\u25CF held in a shard (thick edge) or arrived",
      "\u2192 on its way to this rank",
      "\u00D7 multiplied or added now (strong edge)",
      "2/4 partial sum of 2 of 4 k tiles",
      "\u2197 sent on",
      "\u2713 finished tile of D",
      "dashed: nothing here",
    ])
      html(legend, "li", {}, text);
    // Hatches: what is on its way differs by more than a shade.
    const defs = svgNode(svgNode(parent, "svg", { width: 0, height: 0, "aria-hidden": "true" }), "defs");
    this.colours.forEach((colour, rank) => {
      const pattern = svgNode(defs, "pattern", {
        id: `hatch-${this.number}-${rank}`,
        width: 5,
        height: 5,
        patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)",
      });
      svgNode(pattern, "rect", { width: 2.2, height: 5, fill: colour });
    });
  }

  keysOfGrid(svg, pips) {
    let near = null;
    const go = (pip) => {
      if (near) near.node.classList.remove("near");
      near = pip;
      near.node.classList.add("near");
      near.node.scrollIntoView({ block: "nearest", inline: "nearest" });
      svg.setAttribute("aria-activedescendant", near.node.id);
    };
    svg.addEventListener("focus", () => pips.length && svg.matches(":focus-visible") && go(near || pips[0]));
    svg.addEventListener("blur", () => near && near.node.classList.remove("near"));
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!near || (!way && event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      event.stopPropagation();
      if (!way) return void this.pick({ tile: near.tile, rank: near.rank });
      const [dx, dy] = way;
      const ahead = pips.filter((pip) => (pip.x - near.x) * dx + (pip.y - near.y) * dy > 0);
      const cost = (pip) => Math.abs(pip.x - near.x) * (dx ? 1 : 9) + Math.abs(pip.y - near.y) * (dy ? 1 : 9);
      if (ahead.length) go(ahead.reduce((best, pip) => (cost(pip) < cost(best) ? pip : best)));
    });
  }

  // Ranks: a ring, or a mesh of up to three axes.
  buildRanks(parent) {
    const { model } = this;
    html(parent, "h2", {}, model.mesh.length > 1 ? `Ranks, a mesh ${model.mesh.join("x")}` : "Ranks");
    const size = 340;
    const places = this.nodePlaces(size);
    const radius = Math.max(7, Math.min(24, places.apart * 0.32));
    const height = d3.max(places, (place) => place[1]) + radius + 8;
    const svg = svgNode(parent, "svg", {
      viewBox: `0 0 ${size} ${height}`,
      width: "100%",
      class: "network",
      role: "group",
      "aria-label": "ranks and the links between them",
    });
    const defs = svgNode(svg, "defs");
    this.colours.forEach((colour, rank) => {
      const marker = svgNode(defs, "marker", {
        id: `arrow-${this.number}-${rank}`,
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 4,
        markerHeight: 4,
        orient: "auto",
      });
      svgNode(marker, "path", { d: "M0,0 L8,4 L0,8 z", fill: colour, stroke: style("--ink"), "stroke-width": 0.5 });
    });
    this.path = (src, dst) => {
      const [x0, y0] = places[src],
        [x1, y1] = places[dst];
      const length = Math.hypot(x1 - x0, y1 - y0),
        ux = (x1 - x0) / length,
        uy = (y1 - y0) / length;
      const bend = Math.min(18, length * 0.12);
      const from = [x0 + ux * radius, y0 + uy * radius],
        to = [x1 - ux * (radius + 2), y1 - uy * (radius + 2)];
      const middle = [(x0 + x1) / 2 - uy * bend, (y0 + y1) / 2 + ux * bend];
      return `M${from.map((each) => each.toFixed(1))}Q${middle.map((each) => each.toFixed(1))} ${to.map((each) => each.toFixed(1))}`;
    };
    const ways = svgNode(svg, "g");
    if (model.links.length <= 240)
      for (const [src, dst, size] of model.links)
        svgNode(svgNode(ways, "path", { class: "way", d: this.path(src, dst) }), "title").textContent =
          `rank ${src} to rank ${dst}: ${size}`;
    this.linkLayer = d3.select(svgNode(svg, "g", { class: model.ranks > 16 ? "many" : "" }));
    this.nodes = places.map(([x, y], rank) => {
      const node = svgNode(svg, "g", {
        class: "node",
        "data-rank": rank,
        transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
        tabindex: model.ranks <= 16 ? 0 : -1,
        role: "button",
        "aria-label": `rank ${rank}`,
      });
      svgNode(node, "circle", { r: radius, fill: this.colours[rank] });
      const label = svgNode(node, "text", {
        style: `fill:${inkOn(this.colours[rank])};font-size:${radius < 10 ? 8 : 12}px`,
      });
      label.textContent = rank;
      node.addEventListener("click", () => this.pick({ rank }));
      node.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        this.pick({ rank });
      });
      return node;
    });
    html(parent, "h3", {}, "Now");
    const list = html(parent, "ul", { class: "now" });
    this.nowItems = d3.range(model.ranks).map((rank) => {
      const item = html(list, "li", { "data-rank": rank });
      html(item, "span", {}, `rank ${rank}`);
      return html(item, "span");
    });
    this.live = html(parent, "p", { class: "hidden", "aria-live": "polite" });
  }

  nodePlaces(size) {
    const { mesh, ranks } = this.model;
    const sides = mesh.filter((side) => side > 1);
    let found;
    if (sides.length < 2) {
      const radius = size / 2 - 34;
      found = d3.range(ranks).map((rank) => {
        const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
        return [size / 2 + radius * Math.cos(angle), size / 2 + radius * Math.sin(angle)];
      });
      found.apart = ranks > 1 ? 2 * radius * Math.sin(Math.PI / ranks) : radius;
      if (ranks === 1) found[0] = [size / 2, 60];
      return found;
    }
    const [rows, columns] = mesh.slice(-2);
    const planes = ranks / (rows * columns);
    const step = Math.min((size - 60) / Math.max(1, columns - 1 + (planes - 1) * 0.45), 110);
    found = d3.range(ranks).map((rank) => {
      const plane = Math.floor(rank / (rows * columns)),
        inside = rank % (rows * columns);
      return [
        30 + (inside % columns) * step + plane * step * 0.45,
        34 + Math.floor(inside / columns) * step + plane * step * 0.38,
      ];
    });
    found.apart = planes > 1 ? step * 0.55 : step;
    return found;
  }

  // Timeline: lanes of all ranks on a canvas; with two tracks, the second one as thin bars below the first.
  buildTimeline(parent) {
    const row = html(parent, "div", { class: "row" });
    html(row, "h2", {}, "Timeline");
    const tools = html(row, "div", { class: "tools" });
    if (this.model.tracks.length > 1) {
      const label = html(tools, "label", {}, "shown above: ");
      const select = html(label, "select", { class: "tracks" });
      this.model.tracks.forEach(({ name }, index) => html(select, "option", { value: index }, name));
      select.addEventListener("change", () => {
        this.setTrack(+select.value);
        this.player.resize();
      });
    }
    for (const [text, name, factor] of [
      ["\u2212", "zoom out", 1 / 1.6],
      ["+", "zoom in", 1.6],
    ]) {
      const button = html(
        tools,
        "button",
        { type: "button", "aria-label": name, title: `${name} (Ctrl and the wheel)` },
        text,
      );
      button.addEventListener("click", () => this.zoomBy(factor));
    }
    this.axis = d3.select(svgNode(parent, "svg", { height: 22, width: "100%", "aria-hidden": "true" }));
    this.lanes = html(parent, "div", { class: "lanes", tabindex: -1 });
    this.canvas = html(this.lanes, "canvas", {
      role: "img",
      "aria-label": "timeline of all ranks; the same times are in the history of each rank",
    });
    this.cursor = html(this.lanes, "div", { class: "cursor" });
    const legend = html(parent, "ul", { class: "legend" });
    for (const [kind, name] of Object.entries(KIND_NAMES)) {
      const item = html(legend, "li");
      html(item, "span", { class: "swatch", style: `background:var(${KIND_COLOURS[kind]})` });
      item.append(name);
    }
    this.zoomer = d3
      .zoom()
      .scaleExtent([1, 400])
      .filter(() =>
        d3.event.type === "wheel"
          ? d3.event.ctrlKey || d3.event.metaKey
          : d3.event.touches && d3.event.touches.length > 1,
      );
    this.zoomer.on("zoom", () => {
      this.zoom = d3.event.transform;
      this.drawTimeline();
      this.moveCursor();
    });
    d3.select(this.lanes).call(this.zoomer).on("dblclick.zoom", null);
    let moved = false;
    d3.select(this.canvas).call(
      d3
        .drag()
        .on("start", () => {
          moved = false;
          this.player.pause();
        })
        .on("drag", () => {
          moved = moved || Math.abs(d3.event.dx) + Math.abs(d3.event.dy) > 0;
          this.player.seek(this.scale.invert(d3.mouse(this.canvas)[0]));
        })
        .on("end", () => {
          if (moved) return;
          const [x, y] = d3.mouse(this.canvas);
          const bar = this.barAt(x, y);
          if (bar) this.pick({ op: [bar.rank, bar.op.id] });
          this.player.seek(this.scale.invert(x));
        }),
    );
  }

  zoomBy(factor) {
    const x = this.scale(this.at);
    d3.select(this.lanes).call(this.zoomer.scaleBy, factor, [Math.max(this.side, x), 0]);
  }

  layoutLanes() {
    const { model } = this;
    const used = model.ops.map(() => new Set());
    for (const { times } of model.tracks)
      times.forEach((each, rank) =>
        each.forEach((time, index) => time && KIND_COLOURS[model.ops[rank][index].kind] && used[rank].add(time[0])),
      );
    const many = model.ranks > 16;
    const rowHeight = many ? 8 : model.ranks > 8 ? 13 : 19;
    this.rows = [];
    let y = 4;
    used.forEach((lanes, rank) => {
      for (const lane of model.lanes.filter((each) => lanes.has(each))) {
        this.rows.push({ rank, lane, y, height: rowHeight - 2, bars: [] });
        y += rowHeight;
      }
      y += many ? 3 : 6;
    });
    this.laneHeight = y;
    const find = new Map(this.rows.map((row) => [`${row.rank} ${row.lane}`, row]));
    model.tracks.forEach(({ times }, track) =>
      times.forEach((each, rank) =>
        each.forEach((time, index) => {
          const op = model.ops[rank][index];
          if (time && KIND_COLOURS[op.kind])
            find.get(`${rank} ${time[0]}`).bars.push({ track, rank, op, start: time[1], end: time[2] });
        }),
      ),
    );
  }

  drawTimeline() {
    if (!this.rows) this.layoutLanes();
    const { model, canvas } = this;
    const width = this.lanes.clientWidth || 600,
      dots = window.devicePixelRatio || 1;
    this.side = model.ranks > 16 ? 56 : width < 500 ? 74 : 110;
    const [first, last] = this.span || [this.begin, this.end]; // views beside each other have one axis
    this.plain = d3
      .scaleLinear()
      .domain([first, last > first ? last : first + 1])
      .range([this.side, width - 8]);
    this.zoomer
      .extent([
        [this.side, 0],
        [width - 8, 1],
      ])
      .translateExtent([
        [this.side, 0],
        [width - 8, 1],
      ]);
    this.scale = this.zoom.rescaleX(this.plain);
    canvas.width = width * dots;
    canvas.height = this.laneHeight * dots;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${this.laneHeight}px`;
    const pen = canvas.getContext("2d");
    pen.scale(dots, dots);
    const ink = style("--ink"),
      faint = style("--faint"),
      line = style("--line"),
      paper = style("--panel"),
      mark = style("--mark");
    const colours = Object.fromEntries(Object.entries(KIND_COLOURS).map(([kind, name]) => [kind, style(name)]));
    pen.textBaseline = "middle";
    const wanted = this.picked && this.picked.op;
    let before = -1;
    for (const row of this.rows) {
      const middle = row.y + row.height / 2;
      if (row.rank !== before) {
        pen.fillStyle = line;
        if (before >= 0) pen.fillRect(0, row.y - (model.ranks > 16 ? 2.5 : 4), width, 1);
        pen.fillStyle = this.colours[row.rank];
        pen.fillRect(0, row.y, 5, row.height);
        pen.fillStyle = ink;
        pen.font = `600 ${model.ranks > 16 ? 8 : 11}px system-ui, sans-serif`;
        pen.fillText(width < 500 ? row.rank : `rank ${row.rank}`, 9, middle);
        before = row.rank;
      }
      if (model.ranks <= 16) {
        pen.fillStyle = faint;
        pen.font = "10.5px system-ui, sans-serif";
        pen.textAlign = "right";
        pen.fillText(row.lane, this.side - 6, middle);
        pen.textAlign = "left";
      }
      pen.save();
      pen.beginPath();
      pen.rect(this.side, row.y - 2, width - this.side, row.height + 4);
      pen.clip();
      for (const bar of row.bars) {
        const x = this.scale(bar.start),
          x1 = this.scale(bar.end);
        if (x1 < this.side || x > width) continue;
        const over = model.tracks.length > 1;
        const shown = bar.track === this.track;
        const y = over && !shown ? row.y + row.height * 0.72 : row.y,
          height = over ? row.height * (shown ? 0.68 : 0.28) : row.height;
        const long = Math.max(1, x1 - x);
        pen.globalAlpha = shown ? 1 : 0.55;
        pen.fillStyle = colours[bar.op.kind];
        pen.fillRect(x, y, long, height);
        pen.globalAlpha = 1;
        if (long > 3) {
          pen.fillStyle = paper;
          pen.fillRect(x1 - 0.7, y, 0.7, height);
        }
        if (wanted && wanted[0] === bar.rank && wanted[1] === bar.op.id && shown) {
          pen.strokeStyle = mark;
          pen.lineWidth = 2.5;
          pen.strokeRect(x + 1, y + 1, Math.max(1, long - 2), height - 2);
        }
        if (shown && height > 9 && long > 16) {
          const label = [
            bar.op.title,
            bar.op.tiles[bar.op.tiles.length - 1],
            bar.op.link ? `\u2192${bar.op.link[1]}` : "",
          ].find((text) => text.length * 5.8 + 6 < long);
          if (label) {
            pen.fillStyle = inkOn(colours[bar.op.kind]);
            pen.font = "10px system-ui, sans-serif";
            pen.fillText(label, Math.max(x, this.side) + 3, y + height / 2 + 0.5);
          }
        }
      }
      pen.restore();
    }
    const unit = this.unit === "us" ? "\u00B5s" : "";
    this.axis.selectAll("*").remove();
    this.axis
      .append("g")
      .attr("transform", "translate(0,20)")
      .call(
        d3
          .axisTop(this.scale)
          .ticks(Math.max(2, (width - this.side) / 90))
          .tickFormat((value) => `${d3.format(",")(+value.toFixed(3))} ${unit}`),
      );
  }

  barAt(x, y) {
    const row = this.rows.find((each) => y >= each.y - 1 && y <= each.y + each.height + 1);
    if (!row || x < this.side) return null;
    const slack = 2;
    const hit = row.bars.filter(
      (bar) =>
        bar.track === this.track &&
        this.scale(bar.start) - slack <= x &&
        x <= Math.max(this.scale(bar.end), this.scale(bar.start) + 1) + slack,
    );
    return hit.length ? hit[hit.length - 1] : null;
  }

  moveCursor() {
    const x = this.scale(this.at);
    this.cursor.style.transform = `translateX(${x}px)`;
    this.cursor.style.visibility = x < this.side - 1 ? "hidden" : "visible";
  }

  // Everything that depends on the time.
  show(time) {
    this.at = time;
    const sums = (text) => {
      const found = /^(\d+) of (\d+)/.exec(text);
      return found ? `${found[1]}/${found[2]}` : "\u03A3";
    };
    for (const pip of this.pips) {
      const steps = pip.steps[this.track];
      let step = pip.step;
      if (step < 0 || steps[step][0] > time || (step + 1 < steps.length && steps[step + 1][0] <= time))
        step = Math.max(0, View.place(steps, time));
      if (step === pip.step) continue;
      pip.step = step;
      const [, state, text] = steps[step];
      const { node, label, rank } = pip;
      node.dataset.state = state;
      node.setAttribute("aria-label", `${pip.tile} on rank ${rank}: ${text}`);
      node.firstChild.style.fill = state === "coming" ? `url(#hatch-${this.number}-${rank})` : this.colours[rank];
      if (label) {
        const symbol = state === "partial" ? sums(text) : SYMBOLS[state];
        label.textContent =
          pip.wide && state !== "partial" ? `${rank}${symbol}` : symbol || (state === "absent" ? "" : rank);
        label.style.fill = ["held", "busy", "done"].includes(state) ? inkOn(this.colours[rank]) : "";
        label.style.opacity = state === "absent" || state === "sent" ? 0.6 : 1;
      }
    }
    const active = this.running(time);
    const carried = d3
      .nest()
      .key(({ op }) => op.link.join("-"))
      .entries(active.filter(({ op }) => op.link));
    const links = this.linkLayer.selectAll("path").data(carried, ({ key }) => key);
    links.exit().remove();
    links
      .enter()
      .append("path")
      .attr("class", "link")
      .attr("data-link", ({ key }) => key)
      .each((each, index, nodes) => {
        const [src, dst] = each.key.split("-").map(Number);
        d3.select(nodes[index])
          .attr("d", this.path(src, dst))
          .attr("stroke", this.colours[src])
          .attr("marker-end", `url(#arrow-${this.number}-${src})`)
          .append("title");
      })
      .merge(links)
      .attr("data-ops", ({ values }) => values.map(({ rank, op }) => `${rank}:${op.id}`).join(" "))
      .select("title")
      .text(({ values }) => values.map(({ op }) => `${op.title}, ${op.bytes}`).join("; "));
    const byRank = this.nodes.map(() => []);
    for (const each of active) byRank[each.rank].push(each);
    byRank.forEach((each, rank) => {
      const computes = each.filter(({ op }) => op.kind === "Gemm" || op.kind === "Reduce");
      if (computes.length) this.nodes[rank].dataset.busy = computes[0].op.kind;
      else delete this.nodes[rank].dataset.busy;
      const text =
        each.map(({ op }) => op.title + (op.kind === "LocalCopy" ? " within the rank" : "")).join(", ") ||
        this.idle(rank, time);
      if (this.nowItems[rank].textContent !== text) this.nowItems[rank].textContent = text;
      this.nowItems[rank].parentNode.dataset.ops = each.map(({ op }) => op.id).join(" ");
    });
    this.moveCursor();
    this.markCurrent();
  }

  static place(steps, time) {
    let low = 0,
      high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle][0] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  running(time) {
    const found = [];
    for (const each of this.moving) {
      if (each.start > time) break;
      if (time < each.end) found.push(each);
    }
    return found;
  }

  idle(rank, time) {
    const own = this.movingOf[rank];
    const later = own[d3.bisector(({ start }) => start).right(own, time)];
    if (!later) return this.neverStarts(rank) ? "waits for ever" : "has finished";
    const reason = this.reasons(rank, later.op)
      .filter(({ at }) => at === null || at > time)
      .pop();
    return `${reason ? `waits for ${reason.text}; ` : "idle; "}next ${later.op.title} at ${this.text(later.start)}`;
  }
  neverStarts(rank) {
    return this.times[rank].some((time) => !time);
  }

  // Why an op starts when it does: what it follows, in the order in which it ends.
  reasons(rank, op) {
    const found = [];
    for (const id of op.deps) {
      const index = this.byId[rank].get(id);
      if (index === undefined) {
        found.push({ at: null, text: `op #${id}, which does not exist` });
        continue;
      }
      const dep = this.model.ops[rank][index],
        time = this.times[rank][index];
      if (dep.kind === "Wait") {
        let at = time ? time[2] : null,
          text = `a free slot on rank ${dep.peer} (${dep.flag})`,
          arrived = null;
        if (dep.signal) {
          const [from, id] = dep.signal,
            signal = this.op(from, id);
          const makers = signal.deps
            .map((each) => [this.op(from, each), this.time(from, each)])
            .filter(([each]) => each && KIND_COLOURS[each.kind]);
          for (const [each, when] of makers) {
            text =
              each.kind === "Copy" ? `${each.tiles[0]} from rank ${each.link[0]}` : `${each.title} of rank ${from}`;
            arrived = when && when[3];
          }
          text += ` (${dep.flag})`;
          if (at === null && this.unit === "us" && arrived !== null) at = arrived;
        }
        found.push({ at, text, arrived });
      } else if (dep.kind === "Barrier") found.push({ at: time && time[2], text: "the barrier of all ranks" });
      else found.push({ at: time && time[3], text: dep.title });
    }
    return found.sort((one, other) => (one.at === null) - (other.at === null) || one.at - other.at);
  }

  // What an op still waits for after the last thing that it follows: its lane, or the GPU that other GEMMs occupy.
  delay(rank, op, time, reasons) {
    if (!time || this.unit !== "us" || !KIND_COLOURS[op.kind]) return "";
    const ready = d3.max([this.begin, ...reasons.map(({ at }) => at)]);
    const others = this.movingOf[rank].filter((each) => each.op !== op && each.start < time[1]);
    const ends = (each) => this.times[rank][each.index][2];
    const before = others.filter((each) => this.times[rank][each.index][0] === time[0] && ends(each) > ready + 1).pop();
    const free = Math.max(ready, before ? ends(before) : ready);
    const running =
      op.kind === "Gemm" && time[1] > free + 20
        ? others.filter((each) => each.op.kind === "Gemm" && ends(each) >= time[1]).pop()
        : null;
    return (
      (before ? ` Its lane is busy with ${before.op.title} until ${this.text(free)}.` : "") +
      (running ? ` ${running.op.title} occupies the SMs until it starts.` : "")
    );
  }

  sentence(rank, op, time) {
    const reasons = this.reasons(rank, op);
    const waits = reasons.length
      ? ` It follows ${reasons.map(({ text, at, arrived }) => `${text}${at === null || at === undefined ? ", which never ends" : arrived !== null && arrived !== undefined ? `, there at ${this.text(arrived)}` : `, at ${this.text(at)}`}`).join("; ")}.`
      : "";
    const delay = this.delay(rank, op, time, reasons);
    const what =
      op.kind === "Barrier"
        ? "meets all ranks at the barrier"
        : op.kind === "Signal" || op.kind === "Wait"
          ? `${DOES[op.kind]} the ${op.flag}${op.kind === "Wait" ? `, which rank ${op.peer} sets` : ""}`
          : `${DOES[op.kind]}: ${op.title}${op.bytes ? `, ${op.bytes}` : ""}`;
    if (!time)
      return `rank ${rank} ${what}. ${this.model.tracks[this.track].name === "measured" ? "Not measured." : "Never starts."}${waits}`;
    const [, start, end, done] = time;
    const when = end > start ? `${this.text(start)} to ${this.text(end)}` : `at ${this.text(start)}`;
    const there =
      op.link && done > end
        ? `, arrived on rank ${op.link[1]} at ${this.text(done)}`
        : op.link
          ? `, arrived on rank ${op.link[1]}`
          : "";
    return `rank ${rank} ${what}, ${when}${there}.${waits}${delay}`;
  }

  pick(picked) {
    this.picked = picked;
    const rank = picked && !picked.tile && !picked.op ? picked.rank : null;
    const tiles = picked && picked.op ? this.op(...picked.op).tiles : [];
    for (const pip of this.pips) {
      pip.node.classList.toggle("dim", rank !== null && pip.rank !== rank);
      const on =
        picked &&
        (picked.tile
          ? pip.tile === picked.tile && pip.rank === picked.rank
          : picked.op && tiles.includes(pip.tile) && pip.rank === picked.op[0]);
      pip.node.classList.toggle("picked", Boolean(on));
      pip.node.setAttribute("aria-selected", String(Boolean(on)));
    }
    this.nodes.forEach((node, each) => node.classList.toggle("picked", each === rank));
    this.drawTimeline();
    this.showDetails();
  }

  showDetails() {
    const { details, picked, model } = this;
    details.textContent = "";
    this.currentRows = [];
    if (!picked) {
      html(details, "h2", {}, "History");
      html(
        details,
        "p",
        { class: "faint" },
        "Select a tile, a rank or an op (a bar of the timeline) to see what happens to it, when, and what it waits for.",
      );
      const keys = html(details, "p", { class: "faint" });
      keys.innerHTML =
        "Keys: <kbd>Space</kbd> plays, <kbd>\u2190</kbd> <kbd>\u2192</kbd> step, <kbd>Home</kbd> <kbd>End</kbd> go to the ends, <kbd>+</kbd> <kbd>\u2212</kbd> zoom, <kbd>Esc</kbd> ends the selection, <kbd>Tab</kbd> and the arrow keys reach tiles and ranks.";
      return;
    }
    const head = html(details, "div", { class: "row" });
    const title = html(head, "h2");
    const close = html(head, "button", { type: "button" }, "Close");
    close.addEventListener("click", () => this.pick(null));
    if (picked.op) {
      const [rank, id] = picked.op,
        op = this.op(rank, id);
      title.textContent = `Op #${id} of rank ${rank}: ${op.title}`;
      html(details, "p", { class: "sentence" }, this.sentence(rank, op, this.time(rank, id)));
      html(details, "pre", { class: "op" }, op.text);
      const row = html(details, "p");
      for (const tile of op.tiles)
        html(row, "button", { type: "button" }, `History of ${tile}`).addEventListener("click", () =>
          this.pick({ tile, rank }),
        );
      html(row, "button", { type: "button" }, `Ops of rank ${rank}`).addEventListener("click", () =>
        this.pick({ rank }),
      );
      return;
    }
    let ops;
    if (picked.tile) {
      title.textContent = `Tile ${picked.tile} on rank ${picked.rank}`;
      this.statePart = html(details, "p", { class: "state" });
      const ranks = this.pips.filter(({ tile }) => tile === picked.tile).map(({ rank }) => rank);
      const row = html(details, "p");
      const label = html(row, "label", {}, "rank ");
      const select = html(label, "select");
      for (const rank of ranks) html(select, "option", { value: rank }, String(rank));
      select.value = picked.rank;
      select.addEventListener("change", () => this.pick({ tile: picked.tile, rank: +select.value }));
      ops = (this.onTile.get(picked.tile) || []).filter(([rank, index]) => {
        const op = model.ops[rank][index];
        return rank === picked.rank || (op.link && op.link.includes(picked.rank));
      });
    } else {
      title.textContent = `Rank ${picked.rank}`;
      ops = model.ops[picked.rank].map((_, index) => [picked.rank, index]);
    }
    const table = html(html(details, "div", { class: "scroll" }), "table", { class: "history" });
    const heads = html(html(table, "thead"), "tr");
    for (const text of ["time", "what happens", "op"]) html(heads, "th", { scope: "col" }, text);
    const body = html(table, "tbody");
    const rows = ops.map(([rank, index]) => ({ rank, op: model.ops[rank][index], time: this.times[rank][index] }));
    rows.sort(
      (one, other) =>
        !one.time - !other.time || (one.time && (one.time[1] - other.time[1] || one.time[2] - other.time[2])) || 0,
    );
    for (const { rank, op, time } of rows) {
      const row = html(body, "tr", { "data-op": `${rank}:${op.id}` });
      const cell = html(row, "td");
      if (time)
        html(cell, "button", { type: "button", title: "go to this time" }, this.text(time[1])).addEventListener(
          "click",
          () => {
            this.player.pause();
            this.player.seek(time[1]);
          },
        );
      else cell.textContent = "\u2013";
      html(row, "td", {}, this.sentence(rank, op, time));
      html(html(row, "td"), "button", { type: "button" }, `#${op.id}`).addEventListener("click", () =>
        this.pick({ op: [rank, op.id] }),
      );
      this.currentRows.push([row, time, op]);
    }
    this.markCurrent();
  }

  markCurrent() {
    const { picked } = this;
    if (!picked || picked.op || !this.currentRows) return;
    for (const [row, time] of this.currentRows)
      row.classList.toggle("current", Boolean(time && time[1] <= this.at && this.at < time[2]));
    if (picked.tile && this.statePart) {
      const pip = this.pips.find(({ tile, rank }) => tile === picked.tile && rank === picked.rank);
      const arrivals = this.currentRows.filter(([, time, op]) => time && op.link && op.link[1] === picked.rank);
      const next = d3.min(
        arrivals.filter(([, time]) => time[3] > this.at),
        ([, time]) => time[3],
      );
      const bringer = arrivals.find(([, time]) => time[3] === next);
      const awaited = bringer ? ` What rank ${bringer[2].link[0]} sends arrives at ${this.text(next)}.` : "";
      const text = `At ${this.text(this.at)}: ${pip.steps[this.track][pip.step][2]}.${awaited}`;
      if (this.statePart.textContent !== text) this.statePart.textContent = text;
    }
  }

  say() {
    const parts = this.nowItems.slice(0, 8).map((item, rank) => `rank ${rank}: ${item.textContent}`);
    this.live.textContent = `At ${this.text(this.at)}. ${parts.join(". ")}`;
  }
}

// --- the page: controls, and one plan or several ---------------------------------------------------------

class Player {
  constructor(root, page) {
    Object.assign(this, { root, page, at: 0, speed: 1, timer: null });
    root.textContent = "";
    if (page.title) html(root, "p", { class: "about" }, page.title);
    this.selectors = html(root, "div", { class: "controls", hidden: "" });
    this.buildControls();
    this.holder = html(root, "div", { class: `views ${page.layout}` });
    if (page.layout === "choose") this.buildSelectors();
    this.open(page.layout === "beside" ? page.models : [page.models[0]]);
    document.addEventListener("keydown", (event) => this.key(event));
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      for (const view of this.views) {
        view.drawTimeline();
        view.moveCursor();
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.views.forEach((view) => view.drawTimeline()),
    );
  }

  open(models) {
    this.pause();
    this.holder.textContent = "";
    // All columns exist before anything is measured.
    const columns = models.map(() => html(this.holder, "article"));
    this.views = models.map((model, index) => new View(columns[index], model, this));
    this.resize();
    const failed = this.views.find(({ model }) => model.failure);
    this.seek(this.begin);
    if (failed) {
      const { op } = failed.model.failure;
      if (!op) return void this.seek(this.end);
      const time = failed.time(...op);
      failed.pick({ op });
      this.seek(time ? time[1] : this.end);
    }
  }

  resize() {
    const tracks = d3.merge(this.views.map(({ model }) => model.tracks));
    this.begin = d3.min(tracks, ({ begin }) => begin);
    this.end = d3.max(tracks, ({ end }) => end);
    Object.assign(this.slider, { min: this.begin, max: this.end, step: (this.end - this.begin) / 2000 || 1 });
    for (const view of this.views) {
      view.span = [this.begin, this.end];
      view.drawTimeline();
    }
    this.seek(Math.min(Math.max(this.at, this.begin), this.end));
  }

  buildControls() {
    const bar = html(this.root, "div", { class: "controls", role: "toolbar", "aria-label": "time" });
    const button = (text, name, act) => {
      const node = html(bar, "button", { type: "button", "aria-label": name, title: name }, text);
      node.addEventListener("click", act);
      return node;
    };
    button("|\u25C2", "to the start", () => {
      this.pause();
      this.seek(this.begin);
    });
    button("\u25C2", "step back", () => this.step(-1));
    this.playButton = button("\u25B6 Play", "play", () => this.toggle());
    this.playButton.classList.add("play");
    button("\u25B8", "step", () => this.step(1));
    this.slider = html(bar, "input", { type: "range", "aria-label": "time", class: "time" });
    this.slider.addEventListener("input", () => {
      this.pause();
      this.seek(+this.slider.value);
    });
    this.clock = html(bar, "output");
    const speed = html(html(bar, "label", {}, "speed "), "select", { "aria-label": "speed" });
    for (const [value, text] of [
      [0.2, "\u00D70.2"],
      [0.5, "\u00D70.5"],
      [1, "\u00D71"],
      [2, "\u00D72"],
      [8, "\u00D78"],
    ])
      html(speed, "option", { value }, text);
    speed.value = 1;
    speed.addEventListener("change", () => {
      this.speed = +speed.value;
    });
    this.speedSelect = speed;
  }

  buildSelectors() {
    const { models } = this.page;
    this.selectors.hidden = false;
    const keys = Object.keys(models[0].label);
    const selects = keys.map((key) => {
      const select = html(html(this.selectors, "label", {}, `${key} `), "select", { "data-key": key });
      for (const value of new Set(models.map(({ label }) => String(label[key]))))
        html(select, "option", { value }, value);
      select.addEventListener("change", () => {
        const agreed = (model) =>
          keys.filter((each, index) => String(model.label[each]) === selects[index].value).length +
          (String(model.label[key]) === select.value ? keys.length : 0);
        const best = models.reduce((one, other) => (agreed(other) > agreed(one) ? other : one));
        keys.forEach((each, index) => {
          selects[index].value = String(best.label[each]);
        });
        this.open([best]);
      });
      return select;
    });
  }

  seek(time) {
    this.at = Math.min(Math.max(time, this.begin), this.end);
    for (const view of this.views) view.show(this.at);
    this.slider.value = this.at;
    const [view] = this.views;
    const text = `${view.text(this.at)} of ${view.text(this.end).replace("step ", "")}`;
    this.clock.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    this.root.dataset.time = this.at;
    if (!this.timer) {
      clearTimeout(this.saying);
      this.saying = setTimeout(() => this.views.forEach((each) => each.say()), 400);
    }
  }

  step(way) {
    this.pause();
    const bounds = d3.merge(this.views.map(({ bounds }) => bounds)).sort(d3.ascending);
    const tiny = 1e-6;
    const next =
      way > 0
        ? bounds.find((bound) => bound > this.at + tiny)
        : bounds.reverse().find((bound) => bound < this.at - tiny);
    if (next !== undefined) this.seek(next);
  }

  toggle() {
    if (this.timer || this.again) this.pause();
    else this.play();
  }
  play() {
    if (this.timer) return;
    this.again = null;
    if (this.at >= this.end) this.seek(this.begin);
    let before = performance.now();
    this.timer = d3.timer(() => {
      const now = performance.now();
      this.seek(this.at + ((now - before) / 1000) * (this.speed / PLAY_SECONDS) * (this.end - this.begin));
      before = now;
      if (this.at >= this.end) {
        const again = this.looping;
        this.pause();
        if (again) {
          this.looping = true;
          this.again = setTimeout(() => this.play(), 1500);
        }
      }
    });
    this.playButton.textContent = "\u275A\u275A Pause";
    this.root.dataset.playing = "";
  }
  pause() {
    this.looping = false;
    clearTimeout(this.again);
    this.again = null;
    if (!this.timer) return;
    this.timer.stop();
    this.timer = null;
    this.playButton.textContent = "\u25B6 Play";
    delete this.root.dataset.playing;
    this.seek(this.at);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.target.tagName === "BUTTON" && (event.key === " " || event.key === "Enter")) return;
    const acts = {
      " ": () => this.toggle(),
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      Home: () => {
        this.pause();
        this.seek(this.begin);
      },
      End: () => {
        this.pause();
        this.seek(this.end);
      },
      Escape: () => this.views.forEach((view) => view.pick(null)),
      "+": () => this.views.forEach((view) => view.zoomBy(1.6)),
      "-": () => this.views.forEach((view) => view.zoomBy(1 / 1.6)),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
}

const packed = document.getElementById("model").textContent;
unpack(packed)
  .then((page) => {
    window.explorer = new Player(document.getElementById("page"), page);
    // A page that plays by itself starts again until the reader does something; not for readers who want no motion.
    if (page.play && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      explorer.looping = true;
      explorer.play();
    }
    document.documentElement.dataset.ready = "";
  })
  .catch((error) => {
    document.getElementById("page").textContent = `This page cannot be shown: ${error}`;
    throw error;
  });
