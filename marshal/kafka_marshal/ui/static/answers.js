// Answers of the server, for what shows them.

import { useEffect, useState } from "./vendor/preact.js";
import { ask, isLater, RETRY_MS } from "./api.js";

// Answers that follow the moment, a little later than the map.
export function useAnswer(name, parameters, again) {
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState("");
  const [tries, setTries] = useState(0);
  const key = JSON.stringify(parameters);
  useEffect(() => {
    if (!parameters) {
      setAnswer(null);
      return undefined;
    }
    const control = new AbortController();
    let timer = setTimeout(() => {
      ask(name, parameters, control.signal).then(
        (found) => {
          setAnswer(found);
          setProblem("");
        },
        (error) => {
          if (error.name === "AbortError") return;
          setProblem(error.message);
          if (isLater(error)) timer = setTimeout(() => setTries((before) => before + 1), RETRY_MS);
        },
      );
    }, 60);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [name, key, again, tries]);
  return [answer, problem];
}
