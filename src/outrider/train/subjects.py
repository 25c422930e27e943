"""What the programming tasks of `tasks.py` are about: things to write, questions to answer, and the words to fill in."""

from __future__ import annotations

LANGUAGES = (
    *("Python",) * 8,
    *("JavaScript",) * 4,
    *("Java", "TypeScript", "C", "C++", "Go", "Rust") * 2,
    *("C#", "Ruby", "PHP", "Kotlin", "Swift", "Haskell", "R", "Perl", "Lua", "Scala", "Elixir", "Julia", "Dart", "OCaml"),
)
"""The more often they stand here, the more often they are asked for."""
FUNCTIONS = tuple(
    line.strip()
    for line in """
    counts the vowels in a string; checks whether a number is prime; reverses the words of a sentence
    returns the n-th Fibonacci number; finds the largest number in a list; removes duplicates from a list
    checks whether two words are anagrams; converts Celsius to Fahrenheit; computes the factorial of a number
    finds the second smallest value; checks whether a string is a palindrome; sums the digits of an integer
    flattens a nested list; groups words by their first letter; finds the most common word in a text
    computes the greatest common divisor of two numbers; checks that brackets are balanced; rotates a list by k places
    computes the average of a list of numbers; finds the median of a list; splits a string on several separators
    converts a decimal number to binary; converts a Roman numeral to an integer; checks whether a year is a leap year
    capitalizes every word of a title; counts how often each character occurs; finds all pairs that add up to a target
    binary searches a sorted array; sorts a list with bubble sort; sorts a list with quicksort
    sorts a list with merge sort; computes the power of a number without the built-in operator
    generates all permutations of a list; generates all subsets of a set; computes the dot product of two vectors
    transposes a matrix; multiplies two matrices; finds the longest common prefix of some words
    finds the longest word in a sentence; removes vowels from a text; validates an email address
    validates a phone number; generates a random password; hides all but four digits of a card number
    counts the words in a file; reads a JSON file and returns one of its fields; parses a line of a log file
    parses a query string into a dictionary; formats a number with thousands separators
    formats a duration as hours and minutes; returns the days between two dates; finds the day of the week of a date
    rounds a price to the nearest five cents; computes compound interest; computes a monthly loan payment
    computes the body mass index; computes the area of a polygon; computes the distance between two points
    checks whether a point lies in a circle; converts RGB to a hex colour; finds the missing number in a sequence
    moves all zeros to the end; finds the first character that does not repeat; encodes a message with a Caesar cipher
    compresses a string by counting repeats; computes the Hamming distance of two words
    computes the edit distance of two strings; finds the shortest path in a grid; counts islands in a grid
    traverses a binary tree in order; finds the depth of a binary tree; inserts a key into a binary search tree
    reverses a linked list; detects a cycle in a linked list; finds the middle node of a linked list
    searches a graph breadth first; searches a graph depth first; sorts tasks by what they depend on
    finds the maximum sum of a subarray; merges two sorted arrays; finds the k largest elements
    finds the intersection of two arrays; solves the coin change problem; solves the knapsack problem
    prints the first rows of Pascal's triangle; prints a multiplication table; draws a triangle of stars
    simulates rolling two dice; shuffles a deck of cards; retries another function three times
    caches the results of another function; measures how long a call takes; limits a value to a range
    picks a random item by weight; turns snake_case into camelCase; makes a slug from a title; copies a nested object
    compares two version numbers; merges two dictionaries; inverts a dictionary; reads a CSV file and sums a column
    writes a list of records to a CSV file; downloads a page and returns its title
    walks a directory and lists large files; renames all files in a folder; counts lines of code
    watches a file for changes
    """.replace("\n", ";").split(";")
    if line.strip()
)
PROGRAMS = tuple(
    line.strip()
    for line in """
    a to-do list in the terminal; a number guessing game; a calculator with four operations; a hangman game
    a quiz with five questions; a contact book; a tic-tac-toe game for two players; a rock, paper, scissors game
    a bank account simulation; a tip calculator; a unit converter; a currency converter; a password generator
    a countdown timer; a stopwatch; a simple chat server; a URL shortener; a web scraper for headlines
    a weather lookup that calls an API; a student grade book; an expense tracker; a library catalogue
    an inventory system; a parking garage simulation; a vending machine; an elevator simulation
    a text adventure with three rooms; a snake game; a memory game; a word counter; a Markdown to HTML converter
    a recipe manager; an alarm clock; a simple HTTP server; a REST API for notes; a login form with validation
    a shopping cart; a flash card trainer; a maze generator; a game of life; a sudoku checker; a morse code translator
    a typing speed test; a hotel booking system; a ticket queue; a leaderboard; a duplicate file finder; a backup tool
    a log analyser; a budget planner; a habit tracker
    """.replace("\n", ";").split(";")
    if line.strip()
)
STRUCTURES = (
    *(
        "a stack",
        "a queue",
        "a linked list",
        "a doubly linked list",
        "a binary search tree",
        "a hash map",
        "a min heap",
        "a trie",
    ),
    *("a graph", "a matrix", "a ring buffer", "a set", "a priority queue", "a polynomial", "a fraction"),
    *("a bank account", "a rectangle", "a circle", "a student", "an employee", "a car", "a book", "a playing card", "a date"),
    *(
        "a temperature",
        "a vector",
        "a complex number",
        "a shopping basket",
        "a timer",
        "an event emitter",
        "a logger",
        "a player",
    ),
    *("a music playlist", "a file reader", "a thread pool", "a state machine", "a singleton", "an observer", "an iterator"),
)
CONCEPTS = tuple(
    line.strip()
    for line in """
    recursion; closures; inheritance; polymorphism; interfaces; generics; decorators; generators; list comprehensions
    exceptions; lambda functions; pattern matching; pointers; references; garbage collection; threads; async and await
    promises; callbacks; higher-order functions; immutability; operator overloading; type inference; enums; iterators
    modules; namespaces; scopes; dictionaries; tuples; sets; string formatting; regular expressions; file handling
    unit testing; mocking; logging; big-O notation; binary search; hashing; dynamic programming; memoization
    greedy algorithms; linked lists; stacks and queues; dependency injection; the observer pattern; the factory pattern
    REST; JSON; sockets; environment variables; command-line arguments; pass by value and pass by reference
    shallow and deep copies; mutable default arguments; race conditions; deadlocks
    """.replace("\n", ";").split(";")
    if line.strip()
)
PAIRS = (
    *(
        ("a list", "a tuple"),
        ("an array", "a linked list"),
        ("a process", "a thread"),
        ("SQL", "NoSQL"),
        ("git merge", "git rebase"),
    ),
    *(("var", "let"), ("== and is", "!="), ("a class", "an object"), ("an interface", "an abstract class"), ("GET", "POST")),
    *(("an inner join", "a left join"), ("a compiler", "an interpreter"), ("static typing", "dynamic typing"), ("TCP", "UDP")),
    *(("a stack", "a heap"), ("unit tests", "integration tests"), ("a primary key", "a foreign key"), ("HTTP", "HTTPS")),
    *(
        ("a for loop", "a while loop"),
        ("synchronous code", "asynchronous code"),
        ("a monolith", "microservices"),
        ("Docker", "a VM"),
    ),
)
TABLES: tuple[tuple[str, str, str], ...] = (
    *(("employees", "department", "salary"), ("orders", "customer_id", "total"), ("products", "category", "price")),
    *(
        ("students", "class", "grade"),
        ("flights", "airline", "delay"),
        ("sales", "region", "amount"),
        ("movies", "genre", "rating"),
    ),
    *(("payments", "method", "amount"), ("patients", "ward", "age"), ("songs", "artist", "length"), ("houses", "city", "price")),
    *(
        ("tickets", "status", "hours"),
        ("players", "team", "score"),
        ("invoices", "vendor", "total"),
        ("trips", "driver", "distance"),
    ),
    *(
        ("sensors", "room", "temperature"),
        ("courses", "teacher", "credits"),
        ("posts", "author", "likes"),
        ("cars", "brand", "year"),
    ),
)
"""A table, a column to group by, and one of numbers."""
QUERIES = (
    *("the average {number} of each {group}", "the five rows with the highest {number}", "every {group} with more than ten rows"),
    *(
        "the total {number} per {group}, largest first",
        "all rows whose {number} is above the average",
        "the number of rows per {group}",
    ),
    *(
        "the second highest {number}",
        "every {group} whose total {number} is below 1000",
        "the row with the lowest {number} of each {group}",
    ),
    *(
        "the running total of {number}",
        "the share of each {group} in the total {number}",
        "duplicate rows",
        "rows without a {group}",
    ),
    *("the median {number}", "the rank of each row by {number} within its {group}", "the highest {number} of each year"),
)
CHANGES = (
    *(
        "creates the table {table} with a primary key",
        "adds a column to {table}",
        "deletes all rows of {table} that are a year old",
    ),
    *(
        "raises every {number} in {table} by ten percent",
        "inserts three rows into {table}",
        "adds an index on {group} to {table}",
    ),
    *(
        "creates a view of {table} by {group}",
        "renames the column {number} of {table}",
        "joins {table} with a table of {group} names",
    ),
)
SHELL = tuple(
    line.strip()
    for line in """
    find all files larger than 100 MB; count the lines of every text file; delete empty directories
    rename all .jpeg files to .jpg; list the ten largest folders; show the processes that use most memory
    back up a folder with the date in its name; replace a word in all files of a folder
    print the third column of a file; sort a file and remove duplicates; watch a log for errors
    check whether a website is up; ask the user for a name and greet them; loop over the numbers from 1 to 10
    kill a process by its port; compress a folder; copy files to another machine; check that a file exists
    read a file line by line; create ten numbered folders; print disk usage and warn above 90 percent
    find files that changed today; extract all email addresses from a file; convert all PNG images to JPG
    download a list of URLs; count how often each word occurs; schedule a script every night; make a script executable
    compare two directories; print the IP address; set an environment variable; parse command-line options
    undo the last commit; create a branch and push it; show who changed a line; squash three commits
    list files that git ignores
    """.replace("\n", ";").split(";")
    if line.strip()
)
SET_UP = tuple(
    line.strip()
    for line in """
    Write a Dockerfile for a Flask application; Write a Dockerfile for a React application
    Write a docker-compose file for WordPress; Write a Makefile for a small C program
    Write a .gitignore for a Python project; Write a package.json for a Node project
    Write an HTML page with a contact form; Write an HTML table with three columns; Write a CSS rule that centers a div
    Write a responsive navigation bar in HTML and CSS; Write a login page in HTML and CSS
    Write a photo gallery with CSS grid; Write a pricing card in HTML and CSS; Write a CSS animation that fades in
    Write a dark theme in CSS; Write a landing page in HTML; Write a React component for a counter
    Write a React component that lists users; Write a React form with two fields; Write a Vue component with a button
    Write an Express route that returns JSON; Write a Flask route that accepts a POST request
    Write a FastAPI endpoint for uploading a file; Write a Django model for a blog post
    Write a Spring Boot controller for users; Write a GitHub workflow that builds a Go project
    Write a YAML file that describes a person; Write a JSON schema for a product
    Write an nginx configuration for one static site; Write a systemd unit for a script
    Write a crontab line that runs at noon; Write a Kubernetes deployment with two replicas
    Write a Terraform file for one virtual machine; Write a GraphQL schema for books
    Write a regular expression for dates; Write a regular expression for a postal code
    Write a LaTeX table with two rows; Write an Arduino sketch that blinks an LED
    Write a MATLAB script that plots a sine; Write a VBA macro that colours a row
    Write a Scratch-like loop in pseudocode; Write pseudocode for binary search; Write a Prolog rule for grandparents
    Write an assembly program that adds two numbers; Write a Verilog module for a counter
    Write a shader that draws a gradient
    """.replace("\n", ";").split(";")
    if line.strip()
)
ANALYSES = tuple(
    line.strip()
    for line in """
    load a CSV file with pandas and show the first rows; fill missing values with the mean
    group rows and compute the mean; plot a histogram with matplotlib; plot two lines with a legend
    draw a scatter plot; make a bar chart of counts; merge two data frames on a key; pivot a table; drop duplicate rows
    filter rows by a date; add a column with a running mean; create a numpy array of zeros and fill its diagonal
    multiply two numpy matrices; normalise the columns of an array; fit a linear regression with scikit-learn
    train a decision tree; split data into training and test sets; compute a confusion matrix
    cluster points with k-means; scale features; encode a column of categories; train a small network in PyTorch
    read a JSON file into a data frame; write a data frame to Excel; resample daily data to months
    compute a correlation matrix; simulate a random walk; estimate pi by random points
    draw samples from a normal distribution; run a t-test
    """.replace("\n", ";").split(";")
    if line.strip()
)
NOUNS = (
    *("order", "ticket", "student", "player", "book", "item", "user", "task", "message", "product", "record", "event", "sensor"),
    *("room", "word", "score", "invoice", "recipe", "animal", "city", "song", "photo", "job", "node", "letter", "car", "team"),
)
FIELDS = (
    *("price", "score", "age", "weight", "total", "count", "size", "rating", "amount", "level", "length", "height", "cost"),
    *("points", "value", "speed", "stock", "width", "distance", "salary"),
)
