// The limits of one layer in expectation under uniform routing: the same formulas as epmoe.core.plan, held against it
// by a browser test. Rates per second, sizes in bytes. Names: T tokens per rank, E experts, K per token, H, I sizes.

export const ITEM = { bfloat16: 2, float8: 1 };
const COMBINE = 4; // results go home in float32

// Experts of every rank: contiguous, the first E mod EP ranks hold one more.
export function shares(experts, ep) {
  return Array.from({ length: ep }, (_, r) => Math.floor(experts / ep) + (r < experts % ep ? 1 : 0));
}

// Probability that a token names at least one of n given experts: 1 - C(E - n, K) / C(E, K).
export function hitProbability(experts, topk, n) {
  let miss = 1;
  for (let k = 0; k < topk; k++) miss *= Math.max(0, experts - n - k) / (experts - k);
  return 1 - miss;
}

export function rowBytes(scheme, s) {
  const hidden = s.hidden * ITEM[s.dtype];
  if (scheme === "variable") return hidden + 8;
  if (scheme !== "fixed_capacity") return hidden + 8 * s.topk;
  return Math.ceil((Math.ceil(hidden / 4) * 4 + 8 * s.topk + 4) / 16) * 16;
}

export function limits(s, gpu) {
  const local = shares(s.experts, s.ep), hits = local.map((n) => hitProbability(s.experts, s.topk, n));
  const total = s.ep * s.tokens, busy = 1 - Math.pow(1 - s.topk / s.experts, total);
  const parameters = 3 * s.hidden * s.intermediate, item = ITEM[s.dtype];
  const floors = local.map((n, r) => {
    const assignments = (total * s.topk * n) / s.experts;
    const weight = n * busy * parameters * item, rows = total * hits[r] * s.hidden * (item + 2);
    const memory = (weight + rows) / gpu.bandwidth, compute = (2 * assignments * parameters) / gpu[s.dtype];
    return { local: n, active: n * busy, assignments, memory, compute, floor: Math.max(memory, compute) };
  });
  const slowest = floors.reduce((worst, f) => (f.floor > worst.floor ? f : worst));
  return { ...slowest, resident: slowest.local * parameters * item, bound: slowest.memory >= slowest.compute ? "memory" : "compute", wires: wires(s, local, hits) };
}

function wires(s, local, hits) {
  const sum = (list) => list.reduce((a, b) => a + b, 0), ranks = local.map((_, r) => r);
  const rows = {
    all_gather: () => s.tokens,
    variable: (d) => (s.tokens * s.topk * local[d]) / s.experts,
    dedup: (d) => s.tokens * hits[d],
    fixed_capacity: () => s.tokens,
  };
  const needed = sum(ranks.map((from) => sum(ranks.map((to) => (from === to ? 0 : s.tokens * hits[to])))));
  return Object.fromEntries(Object.entries(rows).map(([scheme, count]) => {
    const sent = ranks.map((from) => sum(ranks.map((to) => (from === to ? 0 : count(to)))));
    const received = ranks.map((to) => sum(ranks.map((from) => (from === to ? 0 : count(to)))));
    const out = rowBytes(scheme, s), home = s.hidden * COMBINE, most = Math.max(...sent, ...received);
    return [scheme, { row: out, sent: sum(sent), needed, dispatch: sum(sent) * out, combine: sum(received) * home, peak: most * (out + home) }];
  }));
}
