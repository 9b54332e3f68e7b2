// Steering: a form, the dry run of the command, its confirmation, and how it goes.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { ask, send, token } from "./api.js";

const TITLES = { pause: "Pause", resume: "Resume", reposition: "Move positions", evict: "Evict", drain: "Drain", redrive: "Redrive", discard: "Discard", redo: "Redo" };
const FIELDS = {
  pause: [["expires", "For how long, at most (5m, 90s, 1h)", "5m"]],
  resume: [],
  reposition: [["to", "Next message to be read: earliest, latest, readable, an offset, or a time (03:14, 10m)", "earliest"]],
  evict: [],
  drain: [],
  redrive: [],
  discard: [],
  redo: [["time", "Done messages of this time, from..until (03:10..03:20, 30m..10m)", ""], ["key", "Only with this key (empty: all)", ""]],
};
const OPTIONAL = ["key"];

// wish: {action, group, topic?, partition?, offset?, member?, topics?, time?}
export function Steer({ wish, onClose }) {
  const dialog = useRef(null);
  const [values, setValues] = useState({});
  const [force, setForce] = useState(false);
  const [plan, setPlan] = useState(null);
  const [job, setJob] = useState(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    if (!wish) return;
    setValues(Object.fromEntries(FIELDS[wish.action].map(([name, , value]) => [name, wish[name] || value])));
    setPlan(null);
    setJob(null);
    setForce(false);
    setProblem("");
    if (!dialog.current.open) dialog.current.showModal();
  }, [wish]);
  useEffect(() => {
    if (!job || job.status !== null) return undefined;
    const timer = setInterval(async () => {
      try {
        const { jobs } = await ask("jobs");
        setJob(jobs.find((each) => each.id === job.id) || job);
      } catch (error) {
        setProblem(error.message);
      }
    }, 500);
    return () => clearInterval(timer);
  }, [job]);
  if (!wish) return html`<dialog ref=${dialog}></dialog>`;
  const about = wish.partition !== undefined ? `${wish.topic}/${wish.partition}${wish.offset === undefined ? "" : `, offset ${wish.offset}`}` : wish.member || "the whole group";
  const attempt = (doing) => async (event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      await doing();
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  const dryRun = attempt(async () => setPlan(await send("plan", { ...wish, ...values, force })));
  const confirm = attempt(async () => setJob(await send("carry-out", { plan: plan.plan })));
  const change = (name) => (event) => {
    setValues({ ...values, [name]: event.target.value });
    setPlan(null);
  };
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="steer-title">
    <form onSubmit=${plan && plan.plan ? confirm : dryRun}>
      <h2 id="steer-title">${TITLES[wish.action]}: ${wish.group}, ${about}</h2>
      ${!job &&
      html`${FIELDS[wish.action].map(
          ([name, label]) => html`<label>${label}<input type="text" required=${!OPTIONAL.includes(name)} value=${values[name]} onInput=${change(name)} /></label>`,
        )}
        ${["evict", "reposition"].includes(wish.action) &&
        html`<label><input type="checkbox" checked=${force} onChange=${(event) => { setForce(event.target.checked); setPlan(null); }} />${" "}
          ${wish.action === "evict" ? "also from a holder that beats" : "offsets outside of the partition's log, too"} (--force)</label>`}
        ${plan &&
        html`<p>${plan.plan ? "The dry run says:" : "It can't be done:"}</p>
          <pre>${(plan.out + plan.err).trim() || "nothing would change"}</pre>
          ${plan.plan && html`<p class="quiet">Confirming runs:</p><pre>${plan.command}</pre>`}`}`}
      ${job && html`<p>${job.status === null ? "It runs." : job.status === 0 ? "Done." : `It ended with status ${job.status}.`}</p>
        <pre aria-live="polite">$ ${job.command}${"\n"}${job.lines.join("\n")}</pre>`}
      ${problem && html`<p class="bad" role="alert">${problem}</p>`}
      <div class="buttons">
        ${!job && !(plan && plan.plan) && html`<button type="submit" disabled=${busy}>Dry run</button>`}
        ${!job && plan && plan.plan && html`<button type="submit" class="danger" disabled=${busy}>Confirm</button>`}
        <button type="button" onClick=${() => dialog.current.close()}>${job ? "Close" : "Cancel"}</button>
      </div>
    </form>
  </dialog>`;
}

// marked: the range of the time axis between the moments that are compared, as from..until; "": none.
export function SteerBar({ actions, group, topics, selected, owner, marked, onWish }) {
  if (!actions) return null;
  if (!token()) {
    return html`<p class="quiet">Steering needs the whole address that <code>kafka-marshal ui</code> printed, with its token.</p>`;
  }
  const button = (label, wish) => html`<button onClick=${() => onWish({ group, ...wish })}>${label}</button>`;
  return html`<div class="buttons" role="group" aria-label="Steering">
    ${button("Pause …", { action: "pause" })} ${button("Resume …", { action: "resume" })}
    ${button("Move positions …", { action: "reposition" })}
    ${selected && button(`Move ${selected.topic}/${selected.partition} …`, { action: "reposition", ...selected })}
    ${selected && owner && button(`Evict from ${selected.topic}/${selected.partition} …`, { action: "evict", ...selected })}
    ${button(`Redo ${selected ? `of ${selected.topic}/${selected.partition} ` : ""}…`, { action: "redo", time: marked, ...(selected || { topics }) })}
    ${owner && button(`Drain ${owner} …`, { action: "drain", member: owner })}
    ${owner && button(`Evict ${owner} …`, { action: "evict", member: owner })}
  </div>`;
}
