addEventListener("load", () => {
  const found = [], boxes = [], wide = innerWidth;
  const tell = (what, text) => found.push(`${what}: ${text.trim().slice(0, 60)}`);
  if (document.scrollingElement.scrollWidth > wide) tell("the page scrolls sideways", `${document.scrollingElement.scrollWidth}`);
  for (const one of document.querySelectorAll(".first .scroll"))
    if (one.scrollWidth > one.clientWidth + 1) tell("first screen scrolls sideways", one.innerText);
  const svgs = [...document.querySelectorAll("svg")].map(svg => [svg, svg.getBoundingClientRect()]);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroll = parent.closest(".scroll, pre"), svg = parent.closest("svg");
    for (const r of range.getClientRects()) {
      if (!scroll && (r.left < -1 || r.right > wide + 1)) tell("outside the page", node.data);
      let box = {left: r.left, right: r.right, top: r.top, bottom: r.bottom, node, svg};
      if (svg) {
        const s = svg.getBoundingClientRect();
        if (r.left < s.left - 2 || r.right > s.right + 2 || r.top < s.top - 2 || r.bottom > s.bottom + 2) tell("cut off by its figure", node.data);
      }
      if (scroll) {
        const s = scroll.getBoundingClientRect();
        box.left = Math.max(box.left, s.left); box.right = Math.min(box.right, s.right);
      }
      if (box.right - box.left > 1) boxes.push(box);
      for (const [other, s] of svgs)
        if (other !== svg && box.left < s.right - 2 && box.right > s.left + 2 && box.top < s.bottom - 2 && box.bottom > s.top + 2) tell("over a figure", node.data);
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom; j++) {
      const b = boxes[j];
      const high = Math.min(a.bottom, b.bottom) - b.top, least = Math.min(a.bottom - a.top, b.bottom - b.top);
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 && high > least / 3) tell("overlap", `${a.node.data.trim().slice(0,25)} | ${b.node.data.trim().slice(0,25)}`);
    }
  });
  const answers = document.querySelector(".short").getBoundingClientRect().bottom + scrollY;
  parent.postMessage({width: wide, texts: boxes.length, answers_end: answers, found}, "*");
});
