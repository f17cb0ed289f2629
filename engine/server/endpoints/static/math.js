// LaTeX of an answer as MathML, which the browser draws. It is linear in the length; what is not understood
// stays as the model wrote it.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TOKEN = /\\[A-Za-z]+\*?|\\[^]|[A-Za-z]|\d+(?:\.\d+)?|\s+|[^]/gu;
const MAX_DEPTH = 24;

const pairs = (text) => text.trim().split(/\s+/).map((pair) => pair.split(":"));
const SYMBOLS = new Map(pairs(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν
  xi:ξ pi:π rho:ρ sigma:σ tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π
  Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω ell:ℓ hbar:ℏ infty:∞ partial:∂ nabla:∇ emptyset:∅ varnothing:∅ aleph:ℵ Re:ℜ Im:ℑ`));
const OPERATORS = new Map(pairs(`
  cdot:⋅ times:× div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ odot:⊙ le:≤ leq:≤ leqslant:≤ ge:≥ geq:≥
  geqslant:≥ ne:≠ neq:≠ ll:≪ gg:≫ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆
  supset:⊃ supseteq:⊇ cup:∪ cap:∩ setminus:∖ land:∧ wedge:∧ lor:∨ vee:∨ neg:¬ lnot:¬ forall:∀ exists:∃ nexists:∄ to:→
  rightarrow:→ longrightarrow:⟶ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ implies:⟹ Leftarrow:⇐ Leftrightarrow:⇔
  iff:⟺ mapsto:↦ uparrow:↑ downarrow:↓ perp:⊥ parallel:∥ mid:∣ nmid:∤ angle:∠ triangle:△ therefore:∴ because:∵ ldots:…
  dots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ colon:: langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:| rvert:|
  lVert:‖ rVert:‖ vert:| Vert:‖ lbrace:{ rbrace:} int:∫ iint:∬ iiint:∭ oint:∮`));
const LARGE = new Map(pairs("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀"));
const LIMITS = new Set("lim limsup liminf max min sup inf argmax argmin Pr det gcd".split(" "));
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln lg deg dim ker hom arg mod
  ${[...LIMITS].join(" ")}`.split(/\s+/));
const ACCENTS = new Map(pairs("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨ underline:_ overbrace:⏞ underbrace:⏟"));
const SPACES = new Map(pairs("\\,:.17 \\::.22 \\;:.28 \\!:-.17 \\quad:1 \\qquad:2 \\thinspace:.17")); // in em
const DOUBLE = new Map(pairs("N:ℕ Z:ℤ Q:ℚ R:ℝ C:ℂ P:ℙ E:𝔼 F:𝔽 H:ℍ 1:𝟙"));
const TEXT = new Set(["text", "textbf", "textit", "textrm", "mathrm", "operatorname", "operatorname*", "mbox"]);
const FONTS = new Set(["mathbf", "boldsymbol", "bm", "mathit", "mathcal", "mathscr", "mathsf", "mathtt", "mathfrak"]);
const IGNORED = new Set(`displaystyle textstyle limits nolimits nonumber notag big Big bigg Bigg bigl bigr Bigl Bigr
  biggl biggr Biggl Biggr`.split(/\s+/));
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ " };
const TABLES = new Set([...Object.keys(FENCES), "matrix", "smallmatrix", "array", "aligned", "align", "align*", "gathered", "split"]);

/** A `math` element of a formula; null if it holds something that is not understood. */
export function math(source, isDisplay) {
  try {
    const parser = new Parser(source.match(TOKEN) ?? []);
    const row = parser.row(0);
    if (!parser.isAtEnd || !row.length) return null;
    const made = node("math", ...row);
    if (isDisplay) made.setAttribute("display", "block");
    return made;
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Unknown extends Error {}

function node(kind, ...children) {
  const made = document.createElementNS(MATHML, kind);
  made.append(...children);
  return made;
}

const group = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", ...nodes));

function operator(text, isStretchy = false) {
  const made = node("mo", text);
  made.setAttribute("stretchy", String(isStretchy));
  return made;
}

class Parser {
  #tokens;
  #at = 0;

  constructor(tokens) {
    this.#tokens = tokens;
  }

  get isAtEnd() {
    this.#skipSpace();
    return this.#at >= this.#tokens.length;
  }

  #skipSpace() {
    while (/^\s/.test(this.#tokens[this.#at] ?? "")) this.#at++;
  }

  get #next() {
    this.#skipSpace();
    return this.#tokens[this.#at];
  }

  #expect(token) {
    if (this.#next !== token) throw new Unknown(token);
    this.#at++;
  }

  /** The nodes up to what ends a group. */
  row(depth) {
    if (depth > MAX_DEPTH) throw new Unknown("depth");
    const nodes = [];
    for (;;) {
      const token = this.#next;
      if (token === undefined || ["}", "&", "\\\\", "\\right", "\\end"].includes(token)) return nodes;
      nodes.push(...this.#scripted(depth));
    }
  }

  /** An atom with what stands above and below it; nothing for a command that only lays out. */
  #scripted(depth) {
    const token = this.#next;
    const name = token.startsWith("\\") ? token.slice(1) : "";
    if (IGNORED.has(name)) {
      this.#at++;
      return [];
    }
    const base = "^_'".includes(token) ? node("mrow") : this.#atom(depth);
    let [sub, sup] = [null, null];
    for (;;) {
      const mark = this.#next;
      if (mark === "'") {
        this.#at++;
        sup = sup ? group([sup, operator("′")]) : operator("′");
      } else if (mark === "^" && !sup) sup = this.#script(depth);
      else if (mark === "_" && !sub) sub = this.#script(depth);
      else if (mark === "\\limits" || mark === "\\nolimits") this.#at++;
      else break;
    }
    const isAround = LARGE.has(name) || LIMITS.has(name) || name.endsWith("brace");
    const [below, above, both] = isAround ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (sub && sup) return [node(both, base, sub, sup)];
    if (sub) return [node(below, base, sub)];
    return sup ? [node(above, base, sup)] : [base];
  }

  #script(depth) {
    this.#at++;
    return this.#argument(depth);
  }

  /** A group in braces, or one atom. */
  #argument(depth) {
    if (this.#next === undefined || depth > MAX_DEPTH) throw new Unknown("argument");
    return this.#atom(depth + 1);
  }

  #atom(depth) {
    const token = this.#next;
    this.#at++;
    if (token === "{") {
      const inner = this.row(depth + 1);
      this.#expect("}");
      return group(inner);
    }
    if (token.startsWith("\\")) return this.#command(token, depth);
    if (/^\d/.test(token)) return node("mn", token);
    if (/^\p{L}/u.test(token)) return node("mi", token);
    if (token === "~") return space("0.28");
    if (/^[+*/=<>()[\]|,.;:!?-]$/.test(token)) return operator(token === "-" ? "−" : token);
    if (/^[^\x00-\x7f]/.test(token)) return operator(token);
    throw new Unknown(token);
  }

  #command(token, depth) {
    const name = token.slice(1);
    const symbol = SYMBOLS.get(name);
    if (symbol) return node("mi", symbol);
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name));
    if (LARGE.has(name)) return node("mo", LARGE.get(name));
    if (FUNCTIONS.has(name)) return node("mi", name);
    if (SPACES.has(token)) return space(SPACES.get(token));
    if ("{}%$#&_".includes(name)) return operator(name);
    if (name === "|") return operator("‖");
    if (name === " ") return space("0.28");
    if (ACCENTS.has(name)) {
      const kind = name.startsWith("under") ? "munder" : "mover";
      return node(kind, this.#argument(depth), operator(ACCENTS.get(name), /over|under|wide/.test(name)));
    }
    if (TEXT.has(name)) return this.#text(name);
    if (FONTS.has(name)) {
      const inner = this.#argument(depth);
      if (/bold|bf|bm/.test(name)) inner.setAttribute("class", "bold");
      return inner;
    }
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return node("mfrac", this.#argument(depth), this.#argument(depth));
      case "binom":
        return fenced("()", fraction(this.#argument(depth), this.#argument(depth)));
      case "sqrt":
        return this.#root(depth);
      case "boxed":
        return this.#argument(depth);
      case "mathbb": {
        const inner = this.#argument(depth);
        return node("mi", DOUBLE.get(inner.textContent) ?? inner.textContent);
      }
      case "left":
        return this.#fences(depth);
      case "begin":
        return this.#table(depth);
      default:
        throw new Unknown(token);
    }
  }

  /** The source of a group in braces. */
  #word() {
    this.#expect("{");
    const start = this.#at;
    let level = 1;
    while (level && this.#at < this.#tokens.length) {
      level += { "{": 1, "}": -1 }[this.#tokens[this.#at]] ?? 0;
      this.#at++;
    }
    if (level) throw new Unknown("{");
    return this.#tokens.slice(start, this.#at - 1).join("");
  }

  #text(name) {
    const word = this.#word().replace(/\\([{}%$#&_ ])/g, "$1");
    // A space at either end of text counts in TeX, and not in MathML.
    return name.startsWith("text") || name === "mbox" ? node("mtext", word.replace(/^ | $/g, "\u00a0")) : node("mi", word);
  }

  #root(depth) {
    if (this.#next !== "[") return node("msqrt", this.#argument(depth));
    this.#at++;
    const index = [];
    while (this.#next !== "]") {
      if (this.#next === undefined) throw new Unknown("[");
      index.push(...this.#scripted(depth + 1));
    }
    this.#at++;
    return node("mroot", this.#argument(depth), group(index));
  }

  #fence() {
    const token = this.#next ?? "";
    this.#at++;
    if (token === ".") return "";
    if (/^[()[\]|/<>]$/.test(token)) return token;
    const name = token.slice(1);
    if ("{}|".includes(name) && name) return name === "|" ? "‖" : name;
    if (OPERATORS.has(name)) return OPERATORS.get(name);
    throw new Unknown(token);
  }

  #fences(depth) {
    const open = this.#fence();
    const inner = this.row(depth + 1);
    this.#expect("\\right");
    return fenced([open, this.#fence()], ...inner);
  }

  #table(depth) {
    const name = this.#word();
    if (!TABLES.has(name)) throw new Unknown(name);
    if (name === "array") this.#word(); // how its columns are aligned
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(node("mtd", ...this.row(depth + 1)));
      const token = this.#next;
      this.#at++;
      if (token === "\\\\") rows.push([]);
      else if (token === "\\end") break;
      else if (token !== "&") throw new Unknown(token);
    }
    if (this.#word() !== name) throw new Unknown(name);
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].childNodes.length) rows.pop();
    const table = node("mtable", ...rows.map((cells) => node("mtr", ...cells)));
    if (/^(align|split|cases)/.test(name)) table.setAttribute("class", name === "cases" ? "cases" : "aligned");
    return name in FENCES ? fenced(FENCES[name], table) : table;
  }
}

function space(ems) {
  const made = node("mspace");
  made.setAttribute("width", `${ems}em`);
  return made;
}

function fraction(above, below) {
  const made = node("mfrac", above, below);
  made.setAttribute("linethickness", "0");
  return made;
}

const fenced = ([open, close], ...inner) => node(
  "mrow", ...(open.trim() ? [operator(open, true)] : []), ...inner, ...(close.trim() ? [operator(close, true)] : []),
);
