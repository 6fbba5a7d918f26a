"use strict";
// A document may contain several trees, added at different times: each is set up once.
for (const root of document.querySelectorAll(".scio-net:not([data-ready])")) {
  root.dataset.ready = "";
  const tree = root.querySelector(".sn-tree");
  const rows = [...tree.querySelectorAll(".sn-row")];
  const texts = rows.map((row) => (row.title + " " + row.textContent).toLowerCase());
  const branches = [...tree.querySelectorAll("details")];
  let before = null;

  const tools = document.createElement("div");
  tools.className = "sn-tools";
  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = "Search layers";
  box.setAttribute("aria-label", "Search layers by label, name, type or shape");
  const count = document.createElement("output");
  count.setAttribute("aria-live", "polite");
  const button = (text, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", () => act(made));
    tools.append(made);
    return made;
  };

  const filter = () => {
    const wanted = box.value.trim().toLowerCase();
    const recorded = only !== null && only.getAttribute("aria-pressed") === "true";
    const filtering = wanted !== "" || recorded;
    if (filtering && before === null) before = branches.map((branch) => branch.open);
    if (!filtering && before !== null) {
      branches.forEach((branch, i) => { branch.open = before[i]; });
      before = null;
    }
    const items = rows.map((row) => row.closest("li"));
    items.forEach((item) => { item.hidden = filtering; });
    count.textContent = "";
    if (!filtering) return;
    let found = 0;
    rows.forEach((row, i) => {
      if (!texts[i].includes(wanted) || (recorded && !row.classList.contains("sn-recorded"))) return;
      found += 1;
      items[i].hidden = false;
      let above = items[i].parentNode.closest("li");
      while (above !== null && tree.contains(above)) {
        above.hidden = false;
        above.firstElementChild.open = true;
        above = above.parentNode.closest("li");
      }
    });
    count.textContent = found + " of " + rows.length;
  };

  tools.append(box);
  if (branches.length > 1) {
    button("Expand all", () => branches.forEach((branch) => { branch.open = true; }));
    button("Collapse all", () => branches.forEach((branch, i) => { branch.open = i === 0; }));
  }
  const marks = root.dataset.mark ?? "recorded";
  const marked = tree.querySelector(".sn-recorded") !== null;
  const only = !marked ? null : button(marks[0].toUpperCase() + marks.slice(1) + " only", (made) => {
    made.setAttribute("aria-pressed", String(made.getAttribute("aria-pressed") !== "true"));
    filter();
  });
  if (only !== null) only.setAttribute("aria-pressed", "false");
  tools.append(count);
  box.addEventListener("input", filter);
  root.insertBefore(tools, tree);

  // Marked rows are in sight, even if the tree is longer than its box.
  const alarm = tree.querySelector(".sn-alarm");
  if (alarm !== null) {
    const above = alarm.getBoundingClientRect().top - tree.getBoundingClientRect().top;
    tree.scrollTop += above - tree.clientHeight / 3;
  }

  // Notebooks have shortcuts on single letters and arrows, which must not see what is typed here.
  root.dataset.lmSuppressShortcuts = "true";
  root.addEventListener("keydown", (event) => {
    event.stopPropagation();
    const here = event.target.closest(".sn-tree summary, .sn-tree a");
    if (here === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const seen = [...tree.querySelectorAll("summary, a")].filter((item) => item.offsetParent !== null);
    const branch = here.tagName === "SUMMARY" ? here.parentNode : null;
    let next = null;
    if (event.key === "ArrowDown") next = seen[seen.indexOf(here) + 1];
    else if (event.key === "ArrowUp") next = seen[seen.indexOf(here) - 1];
    else if (event.key === "Home") next = seen[0];
    else if (event.key === "End") next = seen[seen.length - 1];
    else if (event.key === "ArrowRight" && branch !== null && !branch.open) branch.open = true;
    else if (event.key === "ArrowRight") next = seen[seen.indexOf(here) + 1];
    else if (event.key === "ArrowLeft" && branch !== null && branch.open) branch.open = false;
    else if (event.key === "ArrowLeft") next = (branch ?? here).parentNode.closest("details")?.querySelector("summary");
    else return;
    event.preventDefault();
    if (next) next.focus();
  });
}
