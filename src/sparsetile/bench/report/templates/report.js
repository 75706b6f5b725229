(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const column = Object.fromEntries(data.columns.map((name, place) => [name, place]));
  const { compare, makeHeader } = sparsetile;
  const PAGE = 200;

  const number = (digits) => (v) => v.toLocaleString("en", { maximumSignificantDigits: digits });
  const times = (v) => v.toFixed(2);
  const COLUMNS = [
    ["matrix", "matrix"], ["nnz", "nonzeros", (v) => v.toLocaleString("en")], ["system", "system"],
    ["n", "N", String], ["dtype", "type"], ["op", "op"], ["status", "status"],
    ["micros", "µs", number(4)], ["spread", "spread %", number(2)], ["speedup", "speedup", times],
    ["gflops", "GFLOP/s", number(4)], ["gbps", "GB/s", number(4)], ["floor", "of floor %", number(3)],
    ["error", "error", number(2)], ["planning", "plan ms", number(3)],
    ["break_even", "break-even", (v) => Math.ceil(v).toLocaleString("en")],
    ["bytes", "format bytes", (v) => v.toLocaleString("en")], ["suite", "suite"], ["device", "machine"],
    ["note", "note"],
  ];
  const rowElement = (row, columns) => {
    const line = document.createElement("tr");
    for (const [name, , format] of columns) {
      const cell = document.createElement("td");
      const v = row[column[name]];
      if (name === "status") {
        const chip = document.createElement("span");
        chip.className = `status ${v}`;
        chip.textContent = v;
        cell.append(chip);
      } else if (v !== null && v !== undefined) {
        cell.textContent = format ? format(v) : v;
      }
      if (format) cell.className = "num";
      if (name === "speedup" && v) cell.classList.add(v >= 1.005 ? "up" : v < 0.995 ? "down" : "even");
      line.append(cell);
    }
    return line;
  };
  const headRow = (table, columns, onSort) => {
    for (const [name, title, format] of columns) {
      const cell = document.createElement("th");
      cell.textContent = title;
      if (format) cell.dataset.type = "number";
      table.tHead.rows[0].append(cell);
      makeHeader(cell, (sign) => onSort(name, sign));
    }
  };

  // All records: filter and sort the data, draw a page of it.
  const all = document.getElementById("all");
  const more = document.getElementById("more");
  let rows = data.rows, order = null, limit = PAGE;
  const text = document.getElementById("filter-text");
  const selects = [...document.querySelectorAll(".filters select")];
  for (const select of selects) {
    const found = [...new Set(data.rows.map((row) => row[column[select.dataset.column]]))];
    found.sort((a, b) => compare(a, b, 1));
    select.append(new Option("all", ""), ...found.map((v) => new Option(v, v)));
  }
  const draw = () => {
    all.tBodies[0].replaceChildren(...rows.slice(0, limit).map((row) => rowElement(row, COLUMNS)));
    more.hidden = rows.length <= limit;
    more.textContent = `Show ${Math.min(1000, rows.length - limit)} more`;
    document.getElementById("shown").textContent =
      `${rows.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} records`;
  };
  const refresh = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows = data.rows.filter((row) => {
      for (const select of selects) {
        if (select.value && String(row[column[select.dataset.column]]) !== select.value) return false;
      }
      if (!words.length) return true;
      const line = `${row[column.matrix]} ${row[column.system]} ${row[column.suite]} ${row[column.status]}`
        .toLowerCase();
      return words.every((word) => line.includes(word));
    });
    if (order) rows.sort((a, b) => compare(a[column[order[0]]], b[column[order[0]]], order[1]));
    draw();
  };
  headRow(all, COLUMNS, (name, sign) => { order = [name, sign]; limit = PAGE; refresh(); });
  more.addEventListener("click", () => { limit += 1000; draw(); });
  text.addEventListener("input", () => { limit = PAGE; refresh(); });
  for (const select of selects) select.addEventListener("change", () => { limit = PAGE; refresh(); });
  draw();

  // A matrix: its records and the plans' explanations are drawn when it is opened.
  const OWN = COLUMNS.filter(([name]) => !["matrix", "nnz", "device"].includes(name));
  for (const box of document.querySelectorAll("details.matrix")) {
    box.addEventListener("toggle", () => {
      const place = box.querySelector(".fill");
      if (!box.open || place.childElementCount) return;
      const frame = document.createElement("div");
      frame.className = "scroll";
      frame.tabIndex = 0;
      const table = document.createElement("table");
      table.createTHead().insertRow();
      const body = table.createTBody();
      const own = data.rows.filter((row) => row[column.matrix] === box.dataset.name);
      const fill = () => body.replaceChildren(...own.map((row) => rowElement(row, OWN)));
      headRow(table, OWN, (name, sign) => {
        own.sort((a, b) => compare(a[column[name]], b[column[name]], sign));
        fill();
      });
      fill();
      frame.append(table);
      place.append(frame);
      for (const [system, words] of Object.entries(data.explain[box.dataset.name] ?? {})) {
        const title = document.createElement("h4");
        title.textContent = `Plan of ${system}`;
        const block = document.createElement("pre");
        block.tabIndex = 0;
        block.textContent = words;
        place.append(title, block);
      }
    });
  }
  // A link to a suite unfolds it.
  const unfold = (hash) => {
    document.getElementById(hash.slice(1))?.querySelector("details.suite")?.setAttribute("open", "");
  };
  for (const link of document.querySelectorAll("nav a")) {
    link.addEventListener("click", () => unfold(link.getAttribute("href")));
  }
  unfold(location.hash);

  document.getElementById("find-matrix").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const box of document.querySelectorAll("details.matrix")) {
      box.hidden = !box.dataset.name.toLowerCase().includes(wanted);
    }
  });
})();
