// Probabilities and tokens as the page shows them.

export const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1]; // least probabilities of the colours, from sure to unsure

// The class of the colour for a probability.
export function colour(p) {
  const level = LEVELS.findIndex((least) => p >= least);
  return `p${level < 0 ? LEVELS.length : level}`;
}

export function percent(p) {
  return 100 * p >= 0.1 || p === 0 ? `${(100 * p).toFixed(1)} %` : "below 0.1 %";
}

// How a token is written where its spaces count.
export const shown = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(part of a character)";
