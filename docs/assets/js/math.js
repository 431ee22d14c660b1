// Mathematics, on the first page and on every page that instant navigation brings.
document$.subscribe(function (page) {
  renderMathInElement(page.body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ],
  });
});
