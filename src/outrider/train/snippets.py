"""Short pieces of code that programming tasks ask about. NOUN and FIELD stand for words that `tasks.py` puts in.

A few have a mistake: those in `FAULTY`."""

from __future__ import annotations

Snippet = tuple[str, str]
"""The language, as a fence names it, and the code."""

SOUND: tuple[Snippet, ...] = (
    (
        "python",
        "def total_FIELD(NOUNs):\n    total = 0\n    for NOUN in NOUNs:\n        total += NOUN['FIELD']\n    return total",
    ),
    (
        "python",
        "def find_NOUN(NOUNs, name):\n    for NOUN in NOUNs:\n        if NOUN.name == name:\n"
        "            return NOUN\n    return None",
    ),
    (
        "python",
        "def load_NOUNs(path):\n    with open(path) as file:\n        lines = file.readlines()\n"
        "    return [line.strip().split(',') for line in lines]",
    ),
    (
        "python",
        "class Noun:\n    def __init__(self, name, FIELD):\n        self.name = name\n        self.FIELD = FIELD\n\n"
        "    def raise_FIELD(self, by):\n        self.FIELD = self.FIELD + by",
    ),
    (
        "python",
        "def count_NOUNs(NOUNs):\n    counts = {}\n    for NOUN in NOUNs:\n        if NOUN in counts:\n"
        "            counts[NOUN] = counts[NOUN] + 1\n        else:\n            counts[NOUN] = 1\n    return counts",
    ),
    ("python", "def best(NOUNs):\n    return sorted(NOUNs, key=lambda x: x.FIELD, reverse=True)[:3]"),
    (
        "python",
        "def bubble(NOUNs):\n    for i in range(len(NOUNs)):\n        for j in range(len(NOUNs) - 1):\n"
        "            if NOUNs[j] > NOUNs[j + 1]:\n"
        "                NOUNs[j], NOUNs[j + 1] = NOUNs[j + 1], NOUNs[j]\n    return NOUNs",
    ),
    ("python", "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)"),
    (
        "python",
        "def average_FIELD(NOUNs):\n    if not NOUNs:\n        return 0\n"
        "    return sum(NOUN.FIELD for NOUN in NOUNs) / len(NOUNs)",
    ),
    (
        "python",
        "import requests\n\ndef get_NOUN(id):\n    r = requests.get('https://example.com/NOUNs/' + str(id))\n    return r.json()",
    ),
    (
        "javascript",
        "function totalFIELD(NOUNs) {\n  let total = 0;\n  for (let i = 0; i < NOUNs.length; i++) {\n"
        "    total += NOUNs[i].FIELD;\n  }\n  return total;\n}",
    ),
    ("javascript", "const names = NOUNs\n  .filter(NOUN => NOUN.FIELD > 10)\n  .map(NOUN => NOUN.name);\nconsole.log(names);"),
    (
        "javascript",
        "app.get('/NOUNs/:id', (req, res) => {\n  const NOUN = NOUNs.find(x => x.id === Number(req.params.id));\n"
        "  res.json(NOUN);\n});",
    ),
    (
        "javascript",
        "fetch('/api/NOUNs')\n  .then(response => response.json())\n  .then(data => {\n    data.forEach(NOUN => {\n"
        "      console.log(NOUN.FIELD);\n    });\n  });",
    ),
    (
        "typescript",
        "interface Noun {\n  name: string;\n  FIELD: number;\n}\n\nfunction cheapest(NOUNs: Noun[]): Noun {\n"
        "  return NOUNs.reduce((a, b) => (a.FIELD < b.FIELD ? a : b));\n}",
    ),
    (
        "java",
        "public class Noun {\n    private String name;\n    private int FIELD;\n\n"
        "    public Noun(String name, int FIELD) {\n"
        "        this.name = name;\n        this.FIELD = FIELD;\n    }\n\n    public int getFIELD() {\n"
        "        return FIELD;\n    }\n}",
    ),
    (
        "java",
        "int max = 0;\nfor (Noun NOUN : NOUNs) {\n    if (NOUN.getFIELD() > max) {\n"
        "        max = NOUN.getFIELD();\n    }\n}\n"
        "System.out.println(max);",
    ),
    (
        "c",
        "int sum(int *NOUNs, int n) {\n    int total = 0;\n    for (int i = 0; i < n; i++) {\n"
        "        total += NOUNs[i];\n    }\n"
        "    return total;\n}",
    ),
    (
        "c",
        "struct NOUN {\n    char name[32];\n    int FIELD;\n    struct NOUN *next;\n};\n\nvoid print(struct NOUN *p) {\n"
        '    while (p != NULL) {\n        printf("%s %d\\n", p->name, p->FIELD);\n        p = p->next;\n    }\n}',
    ),
    (
        "cpp",
        "std::vector<int> even(const std::vector<int>& NOUNs) {\n    std::vector<int> out;\n    for (int x : NOUNs) {\n"
        "        if (x % 2 == 0) out.push_back(x);\n    }\n    return out;\n}",
    ),
    (
        "go",
        "func Total(NOUNs []Noun) int {\n\ttotal := 0\n\tfor _, NOUN := range NOUNs {\n"
        "\t\ttotal += NOUN.FIELD\n\t}\n\treturn total\n}",
    ),
    ("rust", "fn longest(NOUNs: &[String]) -> Option<&String> {\n    NOUNs.iter().max_by_key(|NOUN| NOUN.len())\n}"),
    (
        "ruby",
        "class Noun\n  attr_reader :name, :FIELD\n\n  def initialize(name, FIELD)\n    @name = name\n"
        "    @FIELD = FIELD\n  end\nend",
    ),
    (
        "csharp",
        "public int CountNouns(List<Noun> NOUNs)\n{\n    int count = 0;\n    foreach (var NOUN in NOUNs)\n    {\n"
        "        if (NOUN.FIELD > 0) count++;\n    }\n    return count;\n}",
    ),
    (
        "php",
        "function show($NOUNs) {\n    foreach ($NOUNs as $NOUN) {\n"
        "        echo $NOUN['name'] . ': ' . $NOUN['FIELD'] . \"\\n\";\n    }\n}",
    ),
    ("sql", "SELECT name, FIELD\nFROM NOUNs\nWHERE FIELD > 10\nORDER BY FIELD DESC\nLIMIT 5;"),
    ("sql", "SELECT n.name, COUNT(*)\nFROM NOUNs n\nJOIN owners o ON o.id = n.owner_id\nGROUP BY n.name;"),
    ("bash", 'for file in NOUNs/*.txt; do\n  lines=$(wc -l < "$file")\n  echo "$file has $lines lines"\ndone'),
    ("html", '<ul class="NOUNs">\n  <li>First NOUN</li>\n  <li>Second NOUN</li>\n</ul>'),
    ("css", ".NOUN {\n  display: flex;\n  padding: 10px;\n  background-color: white;\n  border: 1px solid black;\n}"),
    ("python", "import pandas as pd\n\ndf = pd.read_csv('NOUNs.csv')\nprint(df.groupby('name')['FIELD'].mean())"),
    ("haskell", "total :: [Int] -> Int\ntotal [] = 0\ntotal (x:xs) = x + total xs"),
    (
        "kotlin",
        "data class Noun(val name: String, val FIELD: Int)\n\n"
        "fun top(NOUNs: List<Noun>) = NOUNs.sortedByDescending { it.FIELD }.take(3)",
    ),
)
FAULTY: tuple[Snippet, ...] = (
    ("python", "def average(NOUNs):\n    total = 0\n    for NOUN in NOUNs:\n        total = NOUN\n    return total / len(NOUNs)"),
    ("python", "def add_NOUN(NOUN, NOUNs=[]):\n    NOUNs.append(NOUN)\n    return NOUNs"),
    ("python", "for i in range(len(NOUNs)):\n    if NOUNs[i + 1] > NOUNs[i]:\n        print(NOUNs[i])"),
    ("python", "def is_even(FIELD):\n    if FIELD % 2 = 0:\n        return True\n    return False"),
    ("python", "FIELD = input('Enter the FIELD: ')\nif FIELD > 10:\n    print('too much')"),
    ("python", "class Noun:\n    def __init__(name, FIELD):\n        self.name = name\n        self.FIELD = FIELD"),
    (
        "python",
        "def remove_small(NOUNs):\n    for NOUN in NOUNs:\n        if NOUN < 5:\n"
        "            NOUNs.remove(NOUN)\n    return NOUNs",
    ),
    (
        "javascript",
        "function hasNOUN(NOUNs, name) {\n  for (let i = 0; i <= NOUNs.length; i++) {\n"
        "    if (NOUNs[i].name = name) return true;\n  }\n  return false;\n}",
    ),
    (
        "javascript",
        "async function load() {\n  const response = fetch('/NOUNs');\n  const NOUNs = response.json();\n  return NOUNs;\n}",
    ),
    ("java", 'String a = scanner.nextLine();\nif (a == "NOUN") {\n    System.out.println("found");\n}'),
    ("c", "char *copy(char *NOUN) {\n    char out[20];\n    strcpy(out, NOUN);\n    return out;\n}"),
    ("c", 'int FIELD;\nscanf("%d", FIELD);\nprintf("%d\\n", FIELD * 2);'),
    ("cpp", "int* make() {\n    int FIELD = 5;\n    return &FIELD;\n}"),
    ("go", "for i := 0; i < 3; i++ {\n\tgo func() {\n\t\tfmt.Println(NOUNs[i])\n\t}()\n}"),
    ("sql", "SELECT name, SUM(FIELD)\nFROM NOUNs\nWHERE SUM(FIELD) > 100\nGROUP BY name;"),
    ("bash", 'if [ $1 = NOUN ]\n  echo "got a NOUN"\nfi'),
)
