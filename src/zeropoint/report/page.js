"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, n) => row.cells[n].dataset.v ?? row.cells[n].textContent;
  heads.forEach((head, n) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, n), row]);
      const numbers = rows.every(([v]) => v === "" || !Number.isNaN(Number(v)));
      const order = numbers ? (a, b) => (a === "" ? -Infinity : +a) - (b === "" ? -Infinity : +b) : (a, b) => a.localeCompare(b, undefined, { numeric: true });
      rows.sort(([a], [b]) => (down ? -1 : 1) * order(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "Filter by name, scheme or method";
  filter.setAttribute("aria-label", "Filter the rows of the table");
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    said.textContent = wanted ? ` ${shown} of ${body.rows.length} rows` : "";
  });
  table.parentElement.before(filter, said);
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
