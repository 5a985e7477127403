// A table that is wider than the page can be scrolled with the keyboard, too.
const focusable = () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    each.tabIndex = 0;
  }
};
new MutationObserver(focusable).observe(document.body, { childList: true, subtree: true });
focusable();
