// What the stepper shows, as pure functions over a trace: no DOM, so that tests can call them.
// A trace is what a stage's own code carried; see epmoe/core/traces/__init__.py.

export const FORMAT = 1; // of epmoe/core/traces/__init__.py

export const STEPS = ["route", "counts", "pack", "exchange", "experts", "return", "combine"];

export const TITLES = {
  route: "Route", counts: "Counts", pack: "Pack", exchange: "Exchange",
  experts: "Experts", return: "Return", combine: "Combine",
};

export function isAllGather(trace) {
  return trace.collectives[0].some((c) => c.name === "all_gather");
}

// Rows of one rank's send buffer, in buffer order: to, index, token (null: padding).
export function sendRows(trace, rank) {
  const mine = trace.out.filter((m) => m.from === rank);
  return isAllGather(trace) ? mine.filter((m) => m.to === 0) : mine;
}

export function bytesLeaving(trace) {
  return trace.ledger.reduce((sum, book) => sum + book.wire_bytes, 0);
}

export function tally(trace) {
  const crossing = trace.out.filter((m) => m.from !== m.to);
  const delivered = trace.delivered.flat();
  const works = (m) => trace.delivered[m.to].some((r) => r.from === m.from && r.index === m.index && r.experts.length);
  return {
    crossing: crossing.length,
    useful: crossing.filter(works).length,
    padding: crossing.filter((m) => m.token === null).length,
    delivered: delivered.length,
    idle: delivered.filter((r) => !r.experts.length).length,
    assignments: delivered.reduce((sum, r) => sum + r.experts.length, 0),
    computed: trace.ledger.reduce((sum, book) => sum + book.rows_computed, 0),
    syncs: Math.max(...trace.ledger.map((book) => book.host_syncs)),
    collectives: trace.collectives[0].length,
    bytes: bytesLeaving(trace),
    worst: Math.max(...trace.results.map((r) => r.worst)),
  };
}

const many = (n, one, more) => `${n} ${n === 1 ? one : more || one + "s"}`;

// One or two sentences about a step, with this trace's own numbers.
export function sentence(trace, step) {
  const t = tally(trace), ranks = trace.ranks, C = trace.capacity;
  const gathers = isAllGather(trace);
  switch (step) {
    case "route":
      return `${many(trace.tokens.length, "token")} on ${ranks} ranks. The router has named ` +
        `${many(trace.topk, "expert")} for each; small squares show which, in the colour of the rank that owns them.`;
    case "counts":
      if (trace.counts) {
        const lists = trace.counts.map((row, r) => `rank ${r} sends ${row.join(", ")}`).join("; ");
        return `Sizes are data here, so ranks tell each other how many rows to expect: ${lists}. ` +
          `The host has to read them: it waits for the device ${many(t.syncs, "time")} in one call.`;
      }
      return `Nothing to count: every rank sends ${many(C, "row")} to every rank, whatever the router said.` +
        (t.syncs ? ` The host still waits ${t.syncs === 1 ? "once" : t.syncs + " times"}, later, inside the experts.` : " The host never waits.");
    case "pack": {
      const rows = trace.out.length, padding = trace.out.filter((m) => m.token === null).length;
      if (gathers) return `Each rank lays out its ${many(C, "row")}, padded to the fullest rank. Everybody will get a copy of all of them.`;
      if (trace.counts) return `Assignments are sorted by owner rank: ${many(rows, "row")} in all, one for each (token, expert) pair, and no padding.`;
      return `Token t goes to place t of every rank's block: ${many(rows, "row")} in all` +
        (padding ? `, ${padding} of them padding (hatched): the flag in the row says so.` : ".");
    }
    case "exchange":
      return `${many(t.crossing, "row")} ${t.crossing === 1 ? "crosses" : "cross"} between ranks, of ${trace.row_bytes.out} bytes each. ` +
        (t.useful === t.crossing
          ? "All of them have work waiting on the other side."
          : `${t.useful} of them ${t.useful === 1 ? "has" : "have"} work waiting on the other side; ` +
            `${t.crossing - t.useful} ${t.crossing - t.useful === 1 ? "was" : "were"} sent for nothing.`);
    case "experts":
      return `${many(t.assignments, "assignment")} for the experts. ` +
        (t.computed === t.assignments
          ? "Exactly that many rows are computed."
          : `Computed, with the padding of tiles: ${t.computed} rows.`) +
        (t.idle ? ` ${many(t.idle, "delivered row")} ${t.idle === 1 ? "is" : "are"} nobody's, and never read.` : "");
    case "return":
      return `Results go home in float32, ${trace.row_bytes.home} bytes a row, each to the place its token came from` +
        (gathers ? "; reduce-scatter adds them on the way." : ".");
    default:
      return `Every token adds up what came home. Largest difference from the oracle: ${t.worst.toExponential(1)}. ` +
        `In the whole call ${many(t.bytes, "byte")} left their rank, in ${many(t.collectives, "collective")}.`;
  }
}

// The rows of a step as a table for those who read rather than watch: head, then cells.
export function tableOf(trace, step) {
  const name = (m) => (m.token === null ? "padding" : `token ${m.token}`);
  if (step === "route") {
    return [["token", "rank", "experts", "weights"],
      ...trace.tokens.map((t) => [t.token, t.rank, t.experts.join(", "), t.gates.join(", ")])];
  }
  if (step === "counts") {
    const head = ["from rank", ...trace.counts ? trace.counts.map((_, r) => `to ${r}`) : ["to every rank"]];
    const rows = Array.from({ length: trace.ranks }, (_, r) => [r, ...(trace.counts ? trace.counts[r] : [trace.capacity])]);
    return [head, ...rows];
  }
  if (step === "pack" || step === "exchange") {
    return [["row", "from rank", "to rank", "place"], ...trace.out.map((m) => [name(m), m.from, m.to, m.index])];
  }
  if (step === "experts") {
    return [["row", "on rank", "experts", "weights"],
      ...trace.delivered.flatMap((rows, r) => rows.map((m) => [name(m), r, m.experts.join(", ") || "none", m.gates.join(", ")]))];
  }
  if (step === "return") {
    return [["result of", "from rank", "to rank", "first value"],
      ...trace.delivered.flatMap((rows, r) => rows.map((m) => [name(m), r, m.from, m.y[0].toPrecision(3)]))];
  }
  return [["token", "rank", "y", "largest difference"],
    ...trace.results.map((r) => [r.token, r.rank, r.y.map((v) => v.toPrecision(3)).join(", "), r.worst.toExponential(1)])];
}

// Places of everything, in user units. Four columns: tokens, send buffer, received rows, experts.
export const CHIP = 30, GAP = 6;
export function layout(trace) {
  const columns = { tokens: 22, send: 228, received: 512, experts: 776 };
  const top = 26;
  const pitch = CHIP + GAP;
  const lanes = [];
  let y = 46;
  for (let r = 0; r < trace.ranks; r++) {
    const sendLines = isAllGather(trace) ? 1 : trace.ranks;
    const receivedLines = Math.max(1, new Set(trace.delivered[r].map((m) => m.from)).size);
    const local = trace.owners.map((owner, e) => [owner, e]).filter(([owner]) => owner === r).map(([, e]) => e);
    const expertLines = local.length;
    const tokenLines = trace.tokens.filter((t) => t.rank === r).length;
    const lines = Math.max(sendLines, receivedLines, expertLines, tokenLines);
    const height = lines * pitch + 34;
    lanes.push({ rank: r, y, height, local });
    y += height + 16;
  }
  return { columns, lanes, pitch, top, width: 1000, height: y - 6 };
}

export function tokenPlace(plan, trace, token) {
  const info = trace.tokens.find((t) => t.token === token), lane = plan.lanes[info.rank];
  const nth = trace.tokens.filter((t) => t.rank === info.rank).findIndex((t) => t.token === token);
  return { x: plan.columns.tokens, y: lane.y + plan.top + nth * plan.pitch };
}

export function sendPlace(plan, trace, message) {
  const lane = plan.lanes[message.from], line = isAllGather(trace) ? 0 : message.to;
  return { x: plan.columns.send + 34 + message.index * plan.pitch, y: lane.y + plan.top + line * plan.pitch };
}

export function receivedPlace(plan, trace, message) {
  const lane = plan.lanes[message.to];
  const sources = [...new Set(trace.delivered[message.to].map((m) => m.from))].sort((a, b) => a - b);
  return { x: plan.columns.received + 34 + message.index * plan.pitch, y: lane.y + plan.top + sources.indexOf(message.from) * plan.pitch };
}

// An assignment's place beside its expert: the n-th of those that this expert computes.
export function expertPlace(plan, trace, rank, expert, nth) {
  const lane = plan.lanes[rank];
  return { x: plan.columns.experts + 46 + nth * (CHIP - 6), y: lane.y + plan.top + 4 + lane.local.indexOf(expert) * plan.pitch };
}
