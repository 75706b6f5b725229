// Tables of the documentation: a click on a heading sorts; long tables also have a filter. Without
// JavaScript the tables are as the page has them.
"use strict";

const SORTABLE = 9; // rows from which sorting helps
const LONG = 15; // rows from which a table has a filter and a height of its own

// The first number of a cell ("1.91× worst", "1,917", "12 ms"), or its text.
function value(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = text.match(/^[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/i);
  return number ? Number(number[0].replaceAll(",", "")) : text;
}

// Numbers come before words.
function compare(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  return one.localeCompare(other);
}

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const up = heads[column].getAttribute("aria-sort") === "descending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compare(value(a, column), value(b, column)) * (up ? 1 : -1));
  table.tBodies[0].append(...rows);
}

// Show the rows that hold every word.
function filter(table, words) {
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}

function equip(table) {
  const rows = table.tBodies[0]?.rows.length ?? 0;
  if (!table.tHead || rows < SORTABLE) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, column));
    head.append(button);
  });
  if (rows < LONG) return;
  const frame = table.closest(".table-wrapper");
  frame?.classList.add("long");
  frame?.setAttribute("tabindex", "0"); // scrolls with the keyboard
  const input = document.createElement("input");
  input.type = "search";
  input.className = "filter";
  input.placeholder = input.ariaLabel = `Filter ${rows} rows`;
  input.addEventListener("input", () => filter(table, input.value.toLowerCase().split(/\s+/)));
  (frame ?? table).before(input);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("article table").forEach(equip);
});
