/* The read protocol of PeerCache: one owner of memory and its successor, writers, one reader.
 *
 * What is modelled, what is left out, and what was found: README.md beside this file.
 * `check.py` verifies this text as it is, and refutes it with each of the mutations (-D...) below.
 *
 * A page is named by its number: one `set` of one key. A small page takes one granule, a large one
 * two. The byte of page `p` at position `i` is BYTE(p, i), so a byte of another page, a byte at
 * another position and a byte of an earlier content are all told apart.
 *
 * FORGED: the reader asks for any key with a record that an attacker made up. Without it, the records are
 * those of commits, and all pages have one key: the key in the seal then tells them not apart.
 *
 * BYZANTINE, with FORGED: incarnation 0 is a member that shows any reader any word, seal and bytes.
 * Incarnation 1 is honest, and runs from the begin. What is read from the first one is not promised.
 */

#ifndef PAGES
#define PAGES 3
#endif
#ifndef GRANULES
#define GRANULES 2
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 1
#endif
#ifndef LARGE
#define LARGE 255            /* the page that takes two granules; 255: none does */
#endif

#ifndef CELLS
#define CELLS 2              /* steps in which a granule is copied: enough to be torn */
#endif
#ifndef KEYS
#define KEYS 1               /* pages p and p + KEYS have one key */
#endif
#define GENERATIONS 8        /* more than one incarnation ever commits */
#define NO_PAGE 255
#ifndef WITNESS
#define WITNESS true         /* a check that hits happen says that they do not, and is refuted */
#endif
#define NEVER_COMMITTED 1

#define size_of(p)           ((p) == LARGE -> 2 : 1)
#define KEY(p)               ((p) % KEYS)
#define BYTE(p, i)           (((p) + 1) * 8 + (i))
#define is_odd(word)         ((word) & 1)

/* --- memory: one segment an incarnation, never reopened by the next ---------------------------- */

byte words[INCARNATIONS * GRANULES] = NEVER_COMMITTED;
byte bytes[INCARNATIONS * GRANULES * CELLS];
byte seals[INCARNATIONS * GRANULES];  /* page + 1: stands for its key and length; 0: never committed */

#ifdef SEGMENT_REOPENED
#define segment_of(incarnation) 0
#else
#define segment_of(incarnation) (incarnation)
#endif
#define word_at(i, g)        words[segment_of(i) * GRANULES + (g)]
#define byte_at(i, g, n)     bytes[(segment_of(i) * GRANULES + (g)) * CELLS + (n)]
#define seal_at(i, g)        seals[segment_of(i) * GRANULES + (g)]

/* --- messages: what was said stays said ---------------------------------------------------------
 * A message may come late, twice, out of order or never: it is a fact that its receiver may act
 * upon at any later time, any number of times. */

bit  asked[PAGES];           /* Reserve */
byte granted[PAGES];         /* Granted: granule + 1, 0 is nothing yet */
bit  committing[PAGES];      /* Commit */
bit  aborting[PAGES];        /* Abort */
bit  over[PAGES];            /* LiveReservations no longer lists it */
bit  exited[PAGES];          /* the kernel has dropped the lock of the client's process */
byte home[PAGES];            /* the incarnation that Reserve, Commit and Abort are meant for */

/* Records: made by a commit. The directory is the worst that there can be: it, or the reader's
 * cache, may answer with any record ever made, however old, of whichever incarnation. */
bit  made[PAGES];
byte generation[PAGES];
byte place[PAGES];           /* the slot: its first granule */
byte holder[PAGES];          /* the incarnation */

/* --- the owner's books: actors/pool/actor.py, actors/pool/reservations.py, actors/pool/slots.py ------------------------------- */

mtype = { FREE, RESERVED, HELD };
mtype slot[GRANULES] = FREE; /* by first granule; a large page leaves the second one FREE */
byte  who[GRANULES] = NO_PAGE; /* the page that a slot is reserved for, or holds */

mtype = { UNKNOWN, OPEN, ENDED };
mtype reservation[PAGES] = UNKNOWN;

byte sequence;               /* of the living incarnation; an even word is twice this */
byte live;                   /* the living incarnation */
bit  crashed;

#define spans_all            (slot[0] != FREE && size_of(who[0]) == 2)
#define slot_under(g)        (spans_all -> 0 : (g))

#ifdef RESERVED_SLOT_EVICTED
#define may_go(g)            true
#else
#define may_go(g)            (slot[slot_under(g)] != RESERVED)
#endif

#if GRANULES == 1
#define has_room(p)          may_go(0)
#else
#define has_room(p)          (size_of(p) == 2 -> (may_go(0) && may_go(1)) : (may_go(0) || may_go(1)))
#endif

#ifdef RESERVE_NOT_IDEMPOTENT
#define is_new(p)            (reservation[p] != ENDED)
#else
#define is_new(p)            (reservation[p] == UNKNOWN)
#endif

#define may_reserve(p)       (asked[p] && home[p] == me && is_new(p) && has_room(p))

#ifdef COMMIT_NOT_IDEMPOTENT
#define may_commit(p)        (committing[p] && home[p] == me && reservation[p] != UNKNOWN && \
                              sequence < PAGES)  /* or it would go on for ever */
#else
#define may_commit(p)        (committing[p] && home[p] == me && reservation[p] == OPEN)
#endif

#define is_repeated(p)       (committing[p] && home[p] == me && reservation[p] == ENDED)

#ifdef COMMIT_OF_DEAD_ACCEPTED
#define is_taken_for(p)      (me == 1 && home[p] == 1 && reservation[p] == OPEN && granted[p] && \
                              (committing[0] && home[0] == 0 || committing[1] && home[1] == 0))
#endif

/* Why a reservation may end without a commit. Never: because time has passed, because a connection
 * was lost, because nothing was heard. */
#ifdef FREED_BY_TIME
#define may_end(p)           (home[p] == me && reservation[p] == OPEN)
#else
#ifdef FREED_BY_LOST_CONNECTION
bit connected[PAGES] = 1;
#define may_end(p)           (home[p] == me && reservation[p] == OPEN && \
                              (aborting[p] || over[p] || exited[p] || !connected[p]))
#else
#define may_end(p)           (home[p] == me && reservation[p] == OPEN && \
                              (aborting[p] || over[p] || exited[p]))
#endif
#endif

#define is_held(g)           (slot[g] == HELD)

#if PAGES == 2
#define PICK_PAGE(p, may)    if :: may(0) -> p = 0 :: may(1) -> p = 1 fi
#else
#define PICK_PAGE(p, may)    if :: may(0) -> p = 0 :: may(1) -> p = 1 :: may(2) -> p = 2 fi
#endif
#if GRANULES == 1
#define PICK_GRANULE(g, may) if :: may(0) -> g = 0 fi
#else
#define PICK_GRANULE(g, may) if :: may(0) -> g = 0 :: may(1) -> g = 1 fi
#endif

/* --- the rules that the proof rests on; checked in every step ----------------------------------- */

/* The number tells the violated one in the checker's output: `check.py` knows their names. */
#define CHECK(number, condition) assert(0 == number || (condition))
#ifdef RULES
#define RULE(number, condition)  CHECK(number, condition)
#define PROMISE(condition)       skip
#else
#ifdef ALL
#define RULE(number, condition)  CHECK(number, condition)
#else
#define RULE(number, condition)  skip
#endif
#define PROMISE(condition)       CHECK(1, condition)
#endif
#define OWN_SLOT 2           /* only the client of an open reservation writes into its slot */
#define ODD 3                /* a byte or a seal changes only under an odd word */
#define UNREADABLE 4         /* no byte changes under a record that would verify */
#define UNIQUE 5             /* a word never holds an even value twice, nor do two words hold one */
#define WITNESSED 6          /* not a rule: see WITNESS */
#define SEALED 7             /* an even word has its page's key and length */

#define covers(p, g)         (place[p] <= (g) && (g) < place[p] + size_of(p))
#define readable(p, i, g)    (made[p] && segment_of(holder[p]) == segment_of(i) && covers(p, g) && \
                              word_at(holder[p], place[p]) == generation[p])
#if PAGES == 2
#define is_unread(i, g)   (!readable(0, i, g) && !readable(1, i, g))
#define is_unused(value)     (!(made[0] && generation[0] == (value)) && \
                              !(made[1] && generation[1] == (value)))
#else
#define is_unread(i, g)   (!readable(0, i, g) && !readable(1, i, g) && !readable(2, i, g))
#define is_unused(value)     (!(made[0] && generation[0] == (value)) && \
                              !(made[1] && generation[1] == (value)) && \
                              !(made[2] && generation[2] == (value)))
#endif

/* --- the owner ---------------------------------------------------------------------------------- */

#if defined(EVICTED_WITHOUT_ODD) || defined(ODD_AFTER_GRANT)
#define PROTECT              skip
#else
#define PROTECT              make_odd()
#endif

/* One aligned store a word, in any order with what readers and writers do meanwhile. */
inline make_odd() {
    do
    :: d_step { odd & 1 -> word_at(me, 0) = word_at(me, 0) | 1; odd = odd & 2 }
#if GRANULES == 2
    :: d_step { odd & 2 -> word_at(me, 1) = word_at(me, 1) | 1; odd = odd & 1 }
#endif
    :: odd == 0 -> break
    od
}

inline vacate(first) {
    if
    :: slot[first] == HELD -> odd = odd | (1 << first); slot[first] = FREE; who[first] = NO_PAGE
    :: slot[first] == RESERVED -> slot[first] = FREE; who[first] = NO_PAGE
    :: else
    fi
}

inline take(p, g) {
    under = slot_under(g);
    vacate(under);
#if GRANULES == 2
    if
    :: size_of(p) == 2 -> vacate(1)
    :: else
    fi;
#endif
    under = 0;
    odd = odd | (1 << g);
#ifdef TABLE_REINDEXED
    /* One word a slot: when the extent is cut again, only the words of its new slots are made. */
    if
    :: size_of(p) == 2 -> odd = 1
    :: else
    fi;
#endif
    slot[g] = RESERVED;
    who[g] = p;
    reservation[p] = OPEN
}

inline next_generation() {
#ifdef GENERATION_REUSED
    sequence = (sequence == 0 -> 1 : sequence)
#else
    sequence = sequence + 1
#endif
}

inline publish(p, g) {
    RULE(ODD, is_odd(word_at(me, g)));
    RULE(UNIQUE, is_unused(2 * sequence));
    RULE(SEALED, seal_at(me, g) == p + 1);
    word_at(me, g) = 2 * sequence;
    generation[p] = 2 * sequence;
    place[p] = g;
    holder[p] = me;
    made[p] = 1
}

inline seal(p, g) {
    RULE(ODD, is_odd(word_at(me, g)));
    seal_at(me, g) = p + 1
}

proctype Owner(byte me) {
    byte p = NO_PAGE;
    byte g = 0;
    byte under = 0;
    byte odd = 0;            /* bits: granules whose words are still to be made odd */
    {
end_serving:
        do
        :: atomic {          /* Reserve: evict what must go, and only then grant */
               PICK_PAGE(p, may_reserve);
               if
               :: size_of(p) == 2 -> g = 0
               :: else -> PICK_GRANULE(g, may_go)
               fi;
               d_step { take(p, g) }
           };
           PROTECT;
#ifdef PUBLISHED_BEFORE_COMMIT
           atomic { seal(p, g); next_generation(); publish(p, g) };
#endif
           atomic { granted[p] = g + 1; p = NO_PAGE; g = 0 };
#ifdef ODD_AFTER_GRANT
           make_odd();
#endif
           odd = 0

        :: atomic {          /* Commit: the seal, then the word, then the record */
               PICK_PAGE(p, may_commit);
               d_step {
                   g = granted[p] - 1;
                   slot[g] = HELD;
                   who[g] = p;
                   reservation[p] = ENDED;
#ifndef PUBLISHED_BEFORE_COMMIT
#ifdef SEALED_AFTER_WORD
                   next_generation();
                   publish(p, g)
               }
           };
           d_step {
               seal(p, g);
#else
                   seal(p, g)
               }
           };
           d_step {
               next_generation();
               publish(p, g);
#endif
#else
                   skip
               }
           };
           d_step {
#endif
               p = NO_PAGE;
               g = 0
           }

#ifdef REPEATED
        :: atomic {          /* a Commit arrives again: its reservation has ended */
               PICK_PAGE(p, is_repeated);
               CHECK(WITNESSED, WITNESS);
               p = NO_PAGE
           }
#endif

        :: atomic {          /* Abort, LiveReservations, ClientGone: the words are odd and stay so */
               PICK_PAGE(p, may_end);
               d_step {
                   g = granted[p] - 1;
                   slot[g] = FREE;
                   who[g] = NO_PAGE;
                   reservation[p] = ENDED;
                   p = NO_PAGE;
                   g = 0
               }
           }

        :: atomic {          /* Remove, Clear */
               PICK_GRANULE(g, is_held);
               d_step { vacate(g); g = 0 }
           };
#ifndef EVICTED_WITHOUT_ODD
           make_odd();
#endif
           odd = 0

#ifdef COMMIT_OF_DEAD_ACCEPTED
        :: atomic {          /* a Commit to our predecessor, under a number that is open here too */
               PICK_PAGE(p, is_taken_for);
               d_step {
                   g = granted[p] - 1;
                   slot[g] = HELD;
                   reservation[p] = ENDED;
                   seal(p, g);
                   next_generation();
                   publish(p, g);
                   p = NO_PAGE;
                   g = 0
               }
           }
#endif
        od
    } unless { crashed && me == 0 };

    /* The successor: new segment, words that were never even, empty books. */
    d_step {
        p = NO_PAGE; g = 0; under = 0; odd = 0;     /* the dead forget: fewer states */
        slot[0] = FREE; who[0] = NO_PAGE;
#if GRANULES == 2
        slot[1] = FREE; who[1] = NO_PAGE;
#endif
#ifndef COUNTER_RESTARTS
        sequence = GENERATIONS;     /* a random start: none of the predecessor's numbers */
#else
        sequence = 0;
#endif
#if INCARNATIONS == 2
        word_at(1, 0) = NEVER_COMMITTED;
#if GRANULES == 2
        word_at(1, 1) = NEVER_COMMITTED;
#endif
#endif
        live = 1
    };
    run Owner(1)
}

/* --- a writer: paths/write.py. One call of set; a pause is a step that is not taken -------- */

/* A dead node forgets its state; its memory is not reused. */
#define is_own(p, g)         (home[p] != live || reservation[p] == OPEN && granted[p] == (g) + 1 && \
                              slot[g] == RESERVED && who[g] == p)

proctype Writer(byte p) {
    byte g = 0;
    byte n = 0;              /* cells copied */
    byte source = p;         /* the caller's buffer: the page whose bytes are in it */
    {
        d_step { home[p] = live; asked[p] = 1 };
#ifdef UNLISTED_WHILE_COPYING
        over[p] = 1;
#endif
        if
        :: d_step { granted[p] -> g = granted[p] - 1 }
        :: goto ended        /* the deadline: no client copies under this number any more */
        fi;

        do
        :: n < CELLS * size_of(p) ->
           d_step {
               RULE(OWN_SLOT, is_own(p, g));
               RULE(ODD, is_odd(word_at(home[p], g)));
               RULE(UNREADABLE, is_unread(home[p], g + n / CELLS));
               byte_at(home[p], g + n / CELLS, n % CELLS) = BYTE(source, n);
               n = n + 1
           }
        :: n == CELLS * size_of(p) -> committing[p] = 1; break
        :: n < CELLS * size_of(p) && !aborting[p] ->  /* the deadline */
#ifdef COMMITTED_UNWRITTEN
           committing[p] = 1;
           break
#else
#ifdef SOURCE_READ_LATE
           source = PAGES    /* set has returned, its caller has filled the buffer again */
#else
           aborting[p] = 1;
#ifndef COPY_GOES_ON_AFTER_ABORT
           break
#endif
#endif
#endif
        od;
ended:
        over[p] = 1
    }
#ifdef EXITS
    unless { exited[p] }
#endif
}

#ifdef FREED_BY_LOST_CONNECTION
active proctype Network() {
end_network:
    do
    :: connected[0] -> connected[0] = 0
    :: connected[0] == 0 -> connected[0] = 1
    od
}
#endif

/* --- the reader: paths/read.py and a fabric. It reads for ever -------------------------- */

byte destination[GRANULES * CELLS];

#define arrived(p, i)        (destination[i] == BYTE(p, i))
#if GRANULES == 1
#if CELLS == 1
#define is_page(p)           (arrived(p, 0))
#else
#define is_page(p)           (arrived(p, 0) && arrived(p, 1))
#endif
#else
#if CELLS == 1
#define is_page(p)           (arrived(p, 0) && (size_of(p) == 1 || arrived(p, 1)))
#else
#define is_page(p)           (arrived(p, 0) && arrived(p, 1) && \
                              (size_of(p) == 1 || (arrived(p, 2) && arrived(p, 3))))
#endif
#endif

/* Cells arrive in any order: a fabric promises none among the bytes. */
inline pick_cell(i, left) {
    if
    :: left & 1 -> i = 0
#if GRANULES * CELLS > 1
    :: left & 2 -> i = 1
#endif
#if GRANULES * CELLS == 4
    :: left & 4 -> i = 2
    :: left & 8 -> i = 3
#endif
    fi
}

#ifdef BYZANTINE
#define is_byzantine(from)   ((from) == 0)
#else
#define is_byzantine(from)   false
#endif

inline receive(i, from, at) {
    if
    :: !is_byzantine(from) -> destination[i] = byte_at(from, at + i / CELLS, i % CELLS)
#ifdef BYZANTINE
    :: is_byzantine(from) -> destination[i] = BYTE(0, i)
    :: is_byzantine(from) -> destination[i] = BYTE(1, i)
#endif
    fi
}

#ifdef LATE_TRANSFER
byte late_left = 0;
byte late_from = 0;
byte late_at = 0;

/* What goes on with a transfer whose reader has returned. */
active proctype Late() {
    byte i;
end_late:
    do
    :: atomic { late_left -> pick_cell(i, late_left) };
       d_step { receive(i, late_from, late_at); late_left = late_left & ~(1 << i); i = 0 }
    od
}
#endif

/* Which memory a record leads to: that of its incarnation, or nowhere. */
#ifdef INCARNATION_UNCHECKED
#define read_from            live
#else
#define read_from            holder[p]
#endif

#define has_record(q)        made[q]

#define NOT_LOOKED 0         /* no word is 0 */

/* The record that the reader uses. A record is taken at the time of the first look: one that was
 * taken earlier and is used later is another choice at that time. */
inline take_record() {
#ifdef FORGED
    /* Any key, slot and length, in the memory of any incarnation. Any generation: one that the
     * word does not have now is a miss, unless it is the next one, which the attacker can foresee. */
    if
    :: p = 0
#if KEYS > 1
    :: p = 1
#endif
    fi;
    if
    :: from = 0
#if INCARNATIONS == 2
    :: from = live
#endif
    fi;
    if
    :: at = 0
#if GRANULES == 2
    :: at = 1
#endif
    fi;
    if
    :: size = 1
#if GRANULES == 2
    :: at == 0 -> size = 2     /* inside the page memory: every fabric checks it */
#endif
    fi;
    if
    :: wanted = word_at(from, at)
    :: wanted = 2 * (sequence + 1)
    fi;
#else
    PICK_PAGE(p, has_record);
    from = read_from;
    at = place[p];
    size = size_of(p);
    wanted = generation[p];
#endif
    left = (1 << CELLS * size) - 1
}

/* The bytes of a page with the key that was asked for, committed under the record. */
#ifdef FORGED
#define is_true_of(q)        (made[q] && generation[q] == wanted && KEY(q) == p && \
                              size_of(q) == size && is_page(q))
#if PAGES == 2
#define is_right             (is_true_of(0) || is_true_of(1))
#else
#define is_right             (is_true_of(0) || is_true_of(1) || is_true_of(2))
#endif
#else
#define is_right             is_page(p)
#endif

/* The one verification: paths/verify.py. */
#define is_even(word)        (((word) & 1) == 0)
#ifdef FUTURE_ACCEPTED
#define is_first(word)       ((word) <= wanted)
#else
#define is_first(word)       ((word) == wanted)
#endif
#ifdef KEY_UNCOMPARED
#define has_key(sealed)      true
#else
#define has_key(sealed)      ((sealed) && KEY((sealed) - 1) == KEY(p))
#endif
#ifdef LENGTH_UNCOMPARED
#define has_length(sealed)   true
#else
#define has_length(sealed)   ((sealed) && size_of((sealed) - 1) == size)
#endif
#define is_sealed(sealed)    (has_key(sealed) && has_length(sealed))
#ifdef WORD_UNCHECKED
#define is_hit               (left == 0)
#else
#define is_matching          (is_first(first) && word == wanted && is_even(wanted) && \
                              is_sealed(early) && is_sealed(late))
#define is_hit               (left == 0 && (is_byzantine(from) || is_matching))
#endif

inline forget() {
    p = 0; from = 0; at = 0; size = 0; wanted = 0; left = 0;
#ifndef STALE_WORD_JUDGED
    word = NEVER_COMMITTED;
#endif
    first = NOT_LOOKED; early = 0; late = 0
}

active proctype Reader() {
    byte p = 0;              /* the page whose record it is; FORGED: the key that is asked for */
    byte i = 0;
    byte from = 0;           /* of the record: holder, place, length, generation */
    byte at = 0;
    byte size = 0;
    byte wanted = 0;
    byte left = 0;           /* bits: cells that have not arrived */
    byte first = NOT_LOOKED; /* the first look: the word */
    byte early = 0;          /* and, over rdma, the rest of the seal */
    byte late = 0;           /* the last look: the rest of the seal, and the word */
    byte word = NEVER_COMMITTED;
end_resolving:
    do
    :: atomic {
           take_record();
#ifdef SEAL_IN_PIECES
           early = seal_at(from, at)
       };
       atomic {
#endif
#ifdef NO_FIRST_LOOK
           first = wanted;
#else
#ifndef FIRST_LOOK_UNFENCED
           first = word_at(from, at);
#endif
#endif
           if
#ifdef FIRST_LOOK_UNFENCED
           :: first == NOT_LOOKED
#endif
           :: is_first(first) || is_byzantine(from)
           :: else -> forget(); goto end_resolving     /* a miss, whatever else the fabric reads */
           fi
       };
#if defined(LOOKS_WORD_FIRST) && !defined(SEAL_IN_PIECES)
       early = seal_at(from, at);
#endif
#ifdef WORD_BEFORE_BYTES
       word = word_at(from, at);
#endif
       do
       :: atomic { left -> pick_cell(i, left); receive(i, from, at); left = left & ~(1 << i); i = 0 }
       :: left -> break      /* the deadline, or a peer that died: what is not there is ODD */
#ifdef RESUMED
       :: d_step {           /* another holder is asked for the bytes that are missing */
              left && is_byzantine(from) -> from = 1; wanted = word_at(from, at); first = wanted
          }
#endif
#ifdef FIRST_LOOK_UNFENCED
       :: first == NOT_LOOKED -> first = word_at(from, at)
#endif
#ifdef NO_FENCE
       :: word == NEVER_COMMITTED -> word = word_at(from, at)
       :: left == 0 && word != NEVER_COMMITTED -> late = seal_at(from, at); break
#else
       :: left == 0 ->
#if defined(LOOKS_WORD_FIRST) || defined(KEY_LOADED_LATE)
          word = word_at(from, at);
          late = seal_at(from, at);
#else
          late = seal_at(from, at);
#ifndef WORD_BEFORE_BYTES
          word = word_at(from, at);
#endif
#endif
          break
#endif
       od;
#ifndef LOOKS_WORD_FIRST
       early = late;
#endif
#ifdef LATE_TRANSFER
       if
       :: left && late_left == 0 -> d_step { late_left = left; late_from = from; late_at = at }
       :: else
       fi;
#endif
#if defined(UNFINISHED_JUDGED) || defined(STALE_WORD_JUDGED)
       if
       :: left ->
          left = 0;
          early = seal_at(from, at);
          late = early;
#ifdef UNFINISHED_JUDGED
          word = word_at(from, at)
#endif
       :: else
       fi;
#endif
       if
       :: is_hit ->
          CHECK(WITNESSED, WITNESS);
          PROMISE(is_byzantine(from) || is_right);
#ifdef LATE_TRANSFER
          PROMISE(is_right)      /* when the caller uses it */
#endif
       :: else
       fi;
       d_step { forget() };
    od
}

#if INCARNATIONS == 2 && !defined(BYZANTINE)
active proctype Fate() {
    crashed = 1
}
#endif

#ifdef EXITS
active proctype Kill() {
    exited[0] = 1
}
#endif

init {
    atomic {
#ifdef BYZANTINE
        live = 1;
        run Owner(1);
#else
        run Owner(0);
#endif
        run Writer(0);
        run Writer(1);
#if PAGES == 3
        run Writer(2);
#endif
        skip
    }
}
