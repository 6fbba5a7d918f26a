/* Search shows a snippet of each page that it finds, which it fetches. Browsers refuse that where the
   site is opened as files. There, the texts come from page_texts.js, which conf.py writes. */
if (location.protocol === "file:" && location.pathname.endsWith("/search.html")) {
  const loaded = new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "_static/page_texts.js";
    script.onload = resolve;
    document.head.append(script);
  });
  window.fetch = async (address) => {
    await loaded;
    const main = document.createElement("div");
    main.setAttribute("role", "main");
    main.textContent = PAGE_TEXTS[address.split("#")[0].replace(/^\.\//, "")] ?? "";
    return { text: async () => main.outerHTML };
  };
}
