// Light, dark or the system's choice. A classic script in <head>, so that no page flashes in the wrong theme.
(() => {
  const KEY = "specpilot-theme";
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      const value = localStorage.getItem(KEY);
      return CHOICES.includes(value) ? value : "system";
    } catch {
      return "system"; // storage may be forbidden; the system's choice then stands
    }
  }

  function apply(choice) {
    if (choice === "system") root.removeAttribute("data-theme");
    else root.dataset.theme = choice;
    document.dispatchEvent(new CustomEvent("themechange"));
  }

  function label(button, choice) {
    button.querySelector("[data-theme-label]").textContent = choice[0].toUpperCase() + choice.slice(1);
    button.setAttribute("aria-label", `Theme: ${choice}. Press to change it.`);
    button.dataset.choice = choice;
  }

  apply(stored());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(stored()));
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("[data-theme-toggle]");
    if (!button) return;
    button.hidden = false;
    label(button, stored());
    button.addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(button.dataset.choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // the choice then lasts for this page only
      }
      apply(next);
      label(button, next);
    });
  });
})();
