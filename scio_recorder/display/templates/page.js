"use strict";
{
  const table = document.querySelector(".table table");
  const body = table === null ? null : table.tBodies[0];
  const headers = table === null ? [] : [...table.tHead.rows[0].cells];

  // Whether columns are out of sight, which a hint says.
  const region = document.querySelector(".table");
  const fit = () => {
    region?.classList.remove("fits", "wide");
    region?.classList.add(region.scrollWidth > region.clientWidth ? "wide" : "fits");
  };
  addEventListener("resize", fit);
  fit();

  // A cell sorts by its text, unless it carries a number.
  const keyOf = (cell) => (cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value);
  const compare = (numeric, sign) => ([a, , i], [b, , j]) => {
    const missing = (a === "") - (b === "");
    if (missing !== 0 || a === "") return missing || i - j;
    const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true });
    return sign * (Number.isNaN(order) ? 0 : order) || i - j;
  };
  const sort = (column) => {
    const header = headers[column];
    const descending = header.getAttribute("aria-sort") === "ascending";
    for (const other of headers) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const keyed = [...body.rows].map((row, i) => [keyOf(row.cells[column]), row, i]);
    keyed.sort(compare(header.className !== "text", descending ? -1 : 1));
    body.append(...keyed.map(([, row]) => row));
  };
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    if (button !== null) button.addEventListener("click", () => sort(column));
  });

  let showAll = () => {};
  const box = document.querySelector("#search");
  if (box !== null) {
    const count = document.querySelector("#found");
    const items = [...document.querySelectorAll("[data-search]")];
    const texts = items.map((item) => item.dataset.search.toLowerCase());
    const total = body.rows.length;
    const filter = () => {
      const wanted = box.value.trim().toLowerCase();
      let found = 0;
      items.forEach((item, i) => {
        item.hidden = !texts[i].includes(wanted);
        found += item.tagName === "TR" && !item.hidden;
      });
      count.textContent = wanted === "" ? "" : found + " of " + total + " layers";
    };
    box.addEventListener("input", filter);
    box.closest(".tools").hidden = false;
    if (box.value !== "") filter();
    showAll = () => {
      box.value = "";
      filter();
    };
  }

  // A link leads to its row even if the search has hidden the row.
  const reveal = (hash) => {
    const row = hash.startsWith("#layer-") ? document.getElementById(hash.slice(1)) : null;
    if (row === null || row.checkVisibility()) return;
    showAll();
    row.scrollIntoView();
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link !== null) reveal(link.hash);
  });
  addEventListener("hashchange", () => reveal(location.hash));
  reveal(location.hash);
}
