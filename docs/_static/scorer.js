/* How the search orders its results: a page whose title has the words searched comes first. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: (result) => {
    const [, title, anchor, , score] = result;
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const isTitle = words.every((word) => title.toLowerCase().includes(word));
    return score + (isTitle && !anchor ? 15 : 0);
  },
};
