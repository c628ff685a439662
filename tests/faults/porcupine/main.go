// Reads history.edn of a run (tests/faults/history.py), and has Porcupine check it.
//
//	go mod tidy && go run . history.edn
//
// Each page, a key with the bytes that were stored, is a register of its own: stored or not. A miss
// is always allowed, so it is no operation. What is answered with :info may take effect at any time
// after its invocation. Exit status 1: not linearizable.
package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"

	"github.com/anishathalye/porcupine"
)

var line = regexp.MustCompile(
	`^{:process (\d+), :f :(\w+), :key "([^"]*)", :type :(\w+), :value (?:nil|"(\w*)"), :time (\d+)}$`)

type page struct{ key, value string }

var model = porcupine.Model{
	Init: func() interface{} { return false },
	Step: func(state, input, _ interface{}) (bool, interface{}) {
		switch input.(string) {
		case "write":
			return true, true
		case "remove":
			return true, false
		default: // A hit.
			return state.(bool), state
		}
	},
}

type operation struct {
	page
	porcupine.Operation
}

// read returns the operations of a file: pages that were stored or read, and keys that were removed.
func read(file *os.File) (pages []operation, removals []operation) {
	began := map[[2]string]int64{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		said := line.FindStringSubmatch(lines.Text())
		if said == nil {
			fmt.Fprintf(os.Stderr, "not read: %s\n", lines.Text())
			os.Exit(2)
		}
		process, kind, key, what, value := said[1], said[2], said[3], said[4], said[5]
		at, _ := strconv.ParseInt(said[6], 10, 64)
		// A process makes one call at a time, of different keys.
		if what == "invoke" {
			began[[2]string{process, key}] = at
			continue
		}
		client, _ := strconv.Atoi(process)
		ended := at
		if what == "info" {
			ended = math.MaxInt64
		}
		done := operation{page{key, value}, porcupine.Operation{
			ClientId: client, Input: kind, Call: began[[2]string{process, key}], Return: ended}}
		switch {
		case kind == "remove" && what == "ok":
			removals = append(removals, done)
		case kind == "write" || (kind == "read" && value != ""):
			pages = append(pages, done)
		}
	}
	return pages, removals
}

func main() {
	file, err := os.Open(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	pages, removals := read(file)
	registers := map[page][]porcupine.Operation{}
	for _, done := range pages {
		registers[done.page] = append(registers[done.page], done.Operation)
	}
	operations := 0
	violated := 0
	for register, done := range registers {
		for _, removal := range removals {
			if removal.key == register.key {
				done = append(done, removal.Operation)
			}
		}
		operations += len(done)
		if !porcupine.CheckOperations(model, done) {
			fmt.Printf("not linearizable: %s with %s\n", register.key, register.value)
			violated++
		}
	}
	fmt.Printf("%d registers, %d operations, %d not linearizable\n",
		len(registers), operations, violated)
	if violated > 0 {
		os.Exit(1)
	}
}
