"use strict";
const sparsetile = (() => {
  // Theme: follows the system until the button says otherwise.
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Empty cells go last whichever way a column is sorted.
  const compare = (a, b, sign) => {
    const missing = (a === null || a === "") - (b === null || b === "");
    if (missing) return missing;
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const makeHeader = (cell, onSort) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = cell.textContent;
    cell.textContent = "";
    cell.append(button);
    cell.setAttribute("aria-sort", "none");
    cell.scope = "col";
    button.addEventListener("click", () => {
      const down = cell.dataset.type === "number"
        ? cell.getAttribute("aria-sort") !== "descending"
        : cell.getAttribute("aria-sort") === "ascending";
      for (const other of cell.parentNode.children) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      onSort(down ? -1 : 1);
    });
  };

  const value = (cell, numeric) => {
    const text = cell.dataset.value ?? cell.textContent.trim();
    return numeric ? Number(text) : text;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((cell, place) => makeHeader(cell, (sign) => {
      const numeric = cell.dataset.type === "number";
      const rows = [...body.rows].map((row) => [value(row.cells[place], numeric), row]);
      rows.sort((a, b) => compare(a[0], b[0], sign));
      body.append(...rows.map((pair) => pair[1]));
    }));
  }

  // One tooltip for every point of every chart.
  const tip = document.getElementById("tip");
  document.addEventListener("pointerover", (event) => {
    const words = event.target.dataset?.tip;
    tip.hidden = !words;
    if (words) tip.textContent = words;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const width = tip.offsetWidth, x = Math.min(event.clientX + 14, innerWidth - width - 8);
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${event.clientY > 60 ? event.clientY - 36 : event.clientY + 18}px`;
  });

  return { compare, makeHeader };
})();
