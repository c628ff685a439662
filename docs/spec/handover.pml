/* The directory's hand-over: one holder of one page, two owners of its record, views that differ.
 *
 * What is modelled, what is left out, and what was found: README.md in this folder.
 * `check.py` verifies this text as it is, and refutes it with each of the mutations (-D...) below.
 *
 * Each step names the code that it follows. A ring is named by its version. The views of the three
 * nodes pass through the same changes, each at its own time: a node may be many changes behind.
 */

#ifndef STEPS
#define STEPS 2              /* a view is at one of these steps */
#endif
#ifndef THIRD
#define THIRD 2              /* the version at the third step; 0: the ring is again the first one */
#endif
#ifndef MEMBERS0
#define MEMBERS0 3           /* of each version: bit 0 is owner 0, bit 1 is owner 1 */
#endif
#ifndef MEMBERS1
#define MEMBERS1 3
#endif
#ifndef OWNERS0
#define OWNERS0 1            /* of these, who owns the key */
#endif
#ifndef OWNERS1
#define OWNERS1 2
#endif
#ifndef OWNERS2
#define OWNERS2 2
#endif
#ifndef PAGES
#define PAGES 1              /* how often the page is stored; it is removed in between */
#endif
#ifndef LAPSES
#define LAPSES 0             /* how often an owner may hold the holder dead for a while */
#endif
#ifndef STOPS
#define STOPS 0              /* how often an owner's process may stop for a while */
#endif
#ifndef NUMBERS
#define NUMBERS 6            /* of one stream: more than the messages of these worlds */
#endif
#ifndef WITNESS
#define WITNESS true
#endif

#if defined(LATE_APPLIED) || defined(NUMBER_FORGOTTEN)
#define MAY_GO_BACK
#endif
#define NO_RING 3
#define version(step)        ((step) == 2 -> THIRD : (step))
#define members(v)           ((v) == 0 -> MEMBERS0 : ((v) == 1 -> MEMBERS1 : 3))
#define owners(v)            ((v) == 0 -> OWNERS0 : ((v) == 1 -> OWNERS1 : OWNERS2))
#define has(mask, o)         (((mask) >> (o)) & 1)
#define bit_of(o)            (1 << (o))

/* The number tells the violated one in the checker's output: `check.py` knows their names. */
#define CHECK(number, condition) assert(0 == number || (condition))
#define AUTHORITY 1          /* an owner with authority does not lack a stored page */
#define FOUND 2              /* a stored page is in the table of one owner */
#define REMOVED 3            /* an owner that has acknowledged a removal does not have the page */
#define PREFIX 4             /* an owner with authority has exactly what was sent to it so far */
#define WITNESSED 6

/* --- messages: what was sent may arrive late, twice, in another order or never ------------------- */

#define at(o, n)             ((o) * NUMBERS + (n))

mtype = { NOTHING, PUT, DELETE, REPAIR, OTHER };   /* OTHER: a Put or Delete of another page */
mtype message[2 * NUMBERS] = NOTHING;
byte carried[2 * NUMBERS];   /* its record: 0 for none, else which storing of the page */
byte content[2 * NUMBERS];   /* what the owner should have after the message with this number */
byte fresh[2 * NUMBERS];     /* how often an owner had asked for a higher number by then */
byte handed[2];              /* the last HandedOver to an owner: its number */
byte handed_for[2] = NO_RING; /* and its version of the ring; it may arrive any number of times */
bit  is_summed[2];           /* a StreamSummary was sent */
byte summed[2];              /* the number of the last one */
#ifdef LATE_ANSWERS
bit  acknowledged[2 * NUMBERS];
bit  matched[2 * NUMBERS];   /* SummaryMatches */
#endif
bit  differed[2];            /* SummaryDiffers, with the number of the last message */
byte wanted[2];              /* RequestFreshSummary */

/* --- the holder: actors/publisher/actor.py, actors/publisher/streams.py --------------------------- */

mtype = { ABSENT, SENT, CONFIRMED };

byte step;                   /* of its view */
byte page;                   /* 0: it does not hold the page, else which storing of it */
byte stored;                 /* how often the page was stored so far */
bit  turning;                /* the hand-over for this ring is not complete */
byte former;                 /* bits: versions whose owners are sent new pages too */
byte sent[2];                /* by owner: the number of the last message */
byte begun[2];               /* and with which number its stream began */
byte floor;                  /* at least the number of any stream that ended */
byte pending[2];             /* bits: messages without an acknowledgement */
mtype state[2] = ABSENT;     /* of the page's row */
byte expected;               /* bits: owners whose acknowledgement the page needs to count as stored */
byte known;                  /* the newest storing that all of these have acknowledged */
byte removing[2];            /* the number of the message that withdraws the page; 0 for none */
byte withdrawn[2];           /* and which storing it withdraws */

#define ring_here            version(step)
#define is_stream(o)         has(members(ring_here), o)
#define has_number(o)        (!is_stream(o) || sent[o] < NUMBERS - 1)
#define has_numbers          (has_number(0) && has_number(1))

/* --- the owners: actors/directory/actor.py, actors/directory/holdings.py -------------------------- */

byte ring[2] = NO_RING;
byte view[2];                /* its step; without a ring, no view names the holder yet */
byte record[2];              /* what the table has of the holder: 0 or which storing of the page */
byte number[2];              /* of the last message of the stream that was applied */
bit  whole[2];               /* the holder has handed over, and no message is missing since */
byte complete[2] = NO_RING;  /* for which version it has */
byte least[2];               /* a hand-over counts only if it was sent after so many requests */
bit  stopped[2];             /* the process does nothing */
byte stops;
byte lapses;

/* What may be asked of a node that was held dead. */
bit  refuted;                /* it has learned that it was held dead */

/* ShardAuthority: the word in the table. A table that has not ticked lately has none. */
#define is_granted(o)        (!stopped[o] && ring[o] != NO_RING && whole[o] && complete[o] == ring[o])
#define has_authority(o)     (is_granted(o) && has(owners(ring[o]), o))

/* --- what is promised ----------------------------------------------------------------------------- */

byte gone[2];                /* the newest storing whose removal this owner has acknowledged */
byte returned[2];            /* the storing whose set returned while this owner was stopped */

/* An owner that is dead in the holder's view does not count: see README.md. */
#define is_lacking(o)        (has_authority(o) && page && is_stream(o) && record[o] < page && \
                              (known == page || returned[o] == page))
#define is_lost              (page && known == page && record[0] != page && record[1] != page)
#define has_come_back(o)     (record[o] && record[o] <= gone[o])
#define is_other(o)          (is_granted(o) && record[o] != content[at(o, number[o])])

#if LAPSES || STEPS == 3 && MEMBERS1 != 3
#define is_found             true      /* an owner that held the holder dead has dropped the record */
#else
#define is_found             (!is_lost)
#endif

active proctype Promises() {
end_watching:
    do
    :: d_step { is_lacking(0) || is_lacking(1) -> CHECK(AUTHORITY, false) }
    :: d_step { !is_found -> CHECK(FOUND, false) }
    :: d_step { has_come_back(0) || has_come_back(1) -> CHECK(REMOVED, false) }
    :: d_step { is_other(0) || is_other(1) -> CHECK(PREFIX, false) }
    :: d_step { !(WITNESS) -> CHECK(WITNESSED, false) }
    od
}

/* --- the holder ----------------------------------------------------------------------------------- */

/* OutgoingStream: the next number, and what the owner should have from then on. */
inline next_number(o, has_now) {
    differed[o] = 0;         /* an answer to an earlier summary does not count */
    sent[o] = sent[o] + 1;
    content[at(o, sent[o])] = has_now;
    fresh[at(o, sent[o])] = fresh[at(o, sent[o] - 1)]
}

inline put(o) {
    next_number(o, page);
    message[at(o, sent[o])] = PUT;
    carried[at(o, sent[o])] = page;
    pending[o] = pending[o] | bit_of(sent[o]);
    state[o] = SENT
}

inline withdraw(o) {
    next_number(o, 0);
    message[at(o, sent[o])] = DELETE;
    carried[at(o, sent[o])] = page;
    removing[o] = sent[o];
    withdrawn[o] = page;
    state[o] = ABSENT
}

/* _owners: those on this ring, and on the recent former ones. */
#ifdef FORMER_UNSENT
#define targets              owners(ring_here)
#else
#define targets              (owners(ring_here) | (has(former, 0) -> owners(0) : 0) | \
                              (has(former, 1) -> owners(1) : 0) | (has(former, 2) -> owners(2) : 0))
#endif
#define is_target(o)         (has(targets, o) && is_stream(o))
#define is_in(mask, o)       (!has(mask, o) || state[o] == CONFIRMED)

/* WaitingCommits: the answer to the set. */
inline note_known() {
    if
    :: page && known < page && expected != 255 && is_in(expected, 0) && is_in(expected, 1) ->
       known = page
    :: else
    fi
}

/* _turn: new streams, ended streams, and what has to be handed over. */
inline turn(to) {
    old = ring_here;
#ifdef ONE_FORMER_RING
    former = bit_of(old);
#else
    former = former | bit_of(old);
#endif
    if
    :: has(members(old), 0) && sent[0] + 1 > floor -> floor = sent[0] + 1
    :: else
    fi;
    if
    :: has(members(old), 1) && sent[1] + 1 > floor -> floor = sent[1] + 1
    :: else
    fi;
    step = to;
    former = former & ~bit_of(ring_here);
    turn_stream(0);
    turn_stream(1);
    old = 0;
    turning = 1
}

inline turn_stream(o) {
    if
    :: has(members(old), o) && !is_stream(o) ->
       state[o] = ABSENT; pending[o] = 0; removing[o] = 0
    :: !has(members(old), o) && is_stream(o) ->
       sent[o] = floor; begun[o] = floor
    :: else
    fi
}

inline hand_over(o) {
    if
    :: has(owners(ring_here), o) && page && state[o] == ABSENT -> put(o)
    :: else
    fi
}

/* confirm, confirm_all: an owner has applied the messages up to n, or only that with this number. */
inline confirm(o, n, is_all) {
    m = n;
    do
    :: m && has(pending[o], m) ->
       if
       :: carried[at(o, m)] == page && page && state[o] == SENT -> state[o] = CONFIRMED
       :: else
       fi;
       pending[o] = pending[o] & ~bit_of(m);
       if
       :: is_all -> m = m - 1
       :: else -> break
       fi
    :: m && !has(pending[o], m) && is_all -> m = m - 1
    :: else -> break
    od;
    m = 0;
    if
    :: removing[o] && (n == removing[o] || is_all && n > removing[o]) ->
       gone[o] = withdrawn[o]; removing[o] = 0
    :: else
    fi;
    note_known()
}

/* _settle: former owners keep the row until all new ones have acknowledged it, and FORMER_S longer.
 * That is longer than views differ, than a hand-over is repeated without an answer while its owner
 * still trusts the one before (SUMMARY_AGE_MAX_S), and than a message may be on its way. */
#ifdef WITHDRAWN_AT_ONCE
#define are_views_equal      true
#else
#define has_this_ring(o)     (!is_stream(o) || ring[o] == ring_here && view[o] >= step && \
                              (complete[o] == ring_here || !whole[o]))
#define are_views_equal      (has_this_ring(0) && has_this_ring(1))
#endif
#ifdef WITHDRAWN_UNACKNOWLEDGED
#define have_arrived         true
#else
#define have_arrived         (is_in(owners(ring_here), 0) && is_in(owners(ring_here), 1))
#endif

inline leave(o) {
    if
    :: page && is_stream(o) && !has(owners(ring_here), o) && state[o] != ABSENT ->
       withdraw(o); removing[o] = 0
    :: else
    fi
}

inline forget_old(o) {
#ifndef WITHDRAWN_AT_ONCE
    if
    :: handed_for[o] != ring_here -> handed[o] = 0; handed_for[o] = NO_RING
    :: else
    fi
#else
    skip
#endif
}

#ifdef HANDED_OVER_EARLY
#define is_complete          true
#else
#define is_complete          (!turning)
#endif

#define is_awaited(o, n)     (has(pending[o], n) || removing[o] == (n) && (n))
#define are_awaited(o, n)    ((pending[o] & ((2 << (n)) - 1)) || removing[o] && removing[o] <= (n))
#define may_confirm(o, n)    (acknowledged[at(o, n)] && is_awaited(o, n))
#define may_match(o, n)      (matched[at(o, n)] && begun[o] <= (n) && is_stream(o) && \
                              are_awaited(o, n))
#define may_repair(o)        (differed[o] && is_stream(o) && has_number(o))
#define may_hand_over(o)     (is_complete && is_stream(o) && \
                              (handed[o] != sent[o] || handed_for[o] != ring_here))
#define may_sum_up(o)        (is_stream(o) && !(is_summed[o] && summed[o] == sent[o]))
#define may_refresh(o)       (is_stream(o) && wanted[o] > fresh[at(o, sent[o])] && has_number(o))

#define EITHER(o, may)       if :: may(0) -> o = 0 :: may(1) -> o = 1 fi
#if NUMBERS > 3
#define THIRD_ONE(o, n, may) :: may(o, 3) -> n = 3
#else
#define THIRD_ONE(o, n, may)
#endif
#if NUMBERS > 4
#define FOURTH(o, n, may)    :: may(o, 4) -> n = 4
#else
#define FOURTH(o, n, may)
#endif
#if NUMBERS > 5
#define FIFTH(o, n, may)     :: may(o, 5) -> n = 5
#else
#define FIFTH(o, n, may)
#endif
#if NUMBERS > 6
#define SIXTH(o, n, may)     :: may(o, 6) -> n = 6
#else
#define SIXTH(o, n, may)
#endif
#define NUMBER(o, n, may) \
    if :: may(o, 0) -> n = 0 :: may(o, 1) -> n = 1 :: may(o, 2) -> n = 2 \
       THIRD_ONE(o, n, may) FOURTH(o, n, may) FIFTH(o, n, may) SIXTH(o, n, may) fi

#if MEMBERS1 != 3 && STEPS == 3
#define may_turn(to)         (refuted || (to) == 1)      /* it is back once it has refuted */
#else
#define may_turn(to)         true
#endif

/* A new stream goes on after the numbers of those that there were. */
#if MEMBERS0 != 3 || MEMBERS1 != 3
#define may_begin            has_numbers
#else
#define may_begin            true
#endif

active proctype Holder() {
    byte o = 0;
    byte n = 0;
    byte m = 0;
    byte old = 0;
end_holding:
    do
    :: d_step {              /* a client stores the page: _publish */
           !page && stored < PAGES && has_numbers ->
           stored = stored + 1;
           page = stored;
           expected = targets;
           if
           :: is_target(0) -> put(0)
           :: else
           fi;
           if
           :: is_target(1) -> put(1)
           :: else
           fi
       }

    :: d_step {              /* the page is removed or evicted: _drop */
           page && has_numbers && PAGES > 1 ->
           if
           :: is_stream(0) && state[0] != ABSENT -> withdraw(0)
           :: else
           fi;
           if
           :: is_stream(1) && state[1] != ABSENT -> withdraw(1)
           :: else
           fi;
           page = 0
       }

    :: d_step {              /* the next view: _turn */
           step < STEPS - 1 && may_turn(step + 1) && may_begin -> turn(step + 1)
       }
#if STEPS == 3
    :: d_step {              /* or the one after that */
           step == 0 && may_turn(2) && may_begin -> turn(2)
       }
#endif
    :: d_step {              /* _hand_over, to the end */
           turning && has_numbers -> hand_over(0); hand_over(1); turning = 0
       }

    :: d_step {              /* former owners need the row no more */
           former && !turning && are_views_equal && (!page || have_arrived) && has_numbers ->
           leave(0);
           leave(1);
           forget_old(0);
           forget_old(1);
           former = 0
       }

#ifdef OTHERS
    :: d_step {              /* another page is stored or removed */
           is_stream(0) && has_number(0) ->
           m = content[at(0, sent[0])];
           next_number(0, m);
           message[at(0, sent[0])] = OTHER;
           m = 0
       }
#endif
    :: d_step { may_hand_over(0) -> handed[0] = sent[0]; handed_for[0] = ring_here }
    :: d_step { may_hand_over(1) -> handed[1] = sent[1]; handed_for[1] = ring_here }
#ifdef SUMMARIES
    :: d_step { may_sum_up(0) -> is_summed[0] = 1; summed[0] = sent[0] }
    :: d_step { may_sum_up(1) -> is_summed[1] = 1; summed[1] = sent[1] }
#endif

#ifdef LATE_ANSWERS
    :: atomic {              /* Acknowledged */
           if
           :: NUMBER(0, n, may_confirm); o = 0
           :: NUMBER(1, n, may_confirm); o = 1
           fi;
           d_step { acknowledged[at(o, n)] = 0; confirm(o, n, false); o = 0; n = 0 }
       }
    :: atomic {              /* SummaryMatches */
           if
           :: NUMBER(0, n, may_match); o = 0
           :: NUMBER(1, n, may_match); o = 1
           fi;
           d_step { matched[at(o, n)] = 0; confirm(o, n, true); o = 0; n = 0 }
       }
#endif
#ifdef REPAIRS
    :: atomic {              /* SummaryDiffers: the answer is a Repair */
           EITHER(o, may_repair);
           d_step {
               m = content[at(o, sent[o])];
               next_number(o, m);
               message[at(o, sent[o])] = REPAIR;
               carried[at(o, sent[o])] = m;
               m = 0;
               pending[o] = pending[o] | bit_of(sent[o]);
               state[o] = (state[o] == ABSENT -> ABSENT : SENT);
               o = 0
           }
       }
#endif
#if STOPS || STEPS == 3
    :: atomic {              /* RequestFreshSummary: go_on_from */
           EITHER(o, may_refresh);
           d_step {
               m = content[at(o, sent[o])];
               next_number(o, m);
               fresh[at(o, sent[o])] = wanted[o];
               m = 0; o = 0
           }
       }
#endif
#if STOPS
    :: d_step {              /* the set returns, and does not know whether a stopped owner has it */
           page && has(expected, 0) && is_stream(0) && stopped[0] && state[0] == SENT && \
           returned[0] != page -> returned[0] = page
       }
    :: d_step {
           page && has(expected, 1) && is_stream(1) && stopped[1] && state[1] == SENT && \
           returned[1] != page -> returned[1] = page
       }
#endif
    od
}

/* --- an owner ------------------------------------------------------------------------------------- */

/* doubt_all: what was sent before counts no more. */
inline doubt_all() {
    whole[me] = 0;
    least[me] = fresh[at(me, number[me])] + 1;
    wanted[me] = least[me]
}

#ifdef SUMMARY_OF_BEFORE_COUNTS
#define is_fresh(n)          true
#else
#define is_fresh(n)          (fresh[at(me, n)] >= least[me])
#endif
#ifdef SUMMARY_COUNTS_AS_HAND_OVER
#define of_a_summary         ring[me]
#else
#define of_a_summary         NO_RING
#endif

#ifdef LATE_APPLIED
#define is_due(o, n)         true
#else
#define is_due(o, n)         ((n) > number[o])
#endif
#define may_apply(o, n)      (!stopped[o] && message[at(o, n)] != NOTHING && is_due(o, n))
#define serves(o)            (!stopped[o] && ring[o] != NO_RING)
#define may_compare(o)       (serves(o) && handed_for[o] != NO_RING && number[o] <= handed[o])
#define may_sum(o)           (serves(o) && is_summed[o] && number[o] <= summed[o])

/* What has a lower number than the last one applied has no effect any more: fewer states. */
inline advance(to) {
#ifndef MAY_GO_BACK
    i = number[me];
    do
    :: i < to ->
       message[at(me, i)] = NOTHING; content[at(me, i)] = 0;
       i = i + 1
    :: else -> break
    od;
    message[at(me, to)] = NOTHING;
    if
    :: handed[me] < to -> handed[me] = 0; handed_for[me] = NO_RING
    :: else
    fi;
    if
    :: summed[me] < to -> summed[me] = 0; is_summed[me] = 0
    :: else
    fi;
    i = 0;
#endif
    number[me] = to
}

/* Answers come late, or, which is fewer states, at once or never. */
#ifdef LATE_ANSWERS
#define CHOOSE               is_answered = 1
#define ACKNOWLEDGE(n)       acknowledged[at(me, n)] = 1
#define MATCH(n)             matched[at(me, n)] = 1
#else
#define CHOOSE               if :: is_answered = 1 :: is_answered = 0 fi
#define ACKNOWLEDGE(n)       confirm(me, n, false)
#define MATCH(n)             confirm(me, n, true)
#endif

inline apply(n) {
    if
    :: message[at(me, n)] == PUT && carried[at(me, n)] > record[me] ->
       record[me] = carried[at(me, n)]
    :: message[at(me, n)] == DELETE && carried[at(me, n)] >= record[me] -> record[me] = 0
    :: message[at(me, n)] == REPAIR -> record[me] = carried[at(me, n)]
    :: else
    fi;
#ifndef GAP_UNNOTICED
    if
    :: n != number[me] + 1 -> whole[me] = 0
    :: else
    fi;
#endif
    advance(n);
    if
    :: ring[me] != NO_RING && is_awaited(me, n) && is_answered -> ACKNOWLEDGE(n)
    :: else                  /* no view names the holder: its records are kept, and not served */
    fi
}

inline compare(n, version_of_it) {
    if
    :: content[at(me, n)] == record[me] ->
       advance(n);
       if
       :: are_awaited(me, n) && begun[me] <= n && is_answered -> MATCH(n)
       :: else
       fi;
       if
       :: version_of_it != NO_RING && is_fresh(n) -> whole[me] = 1; complete[me] = version_of_it
       :: else
       fi
    :: else ->
       whole[me] = 0;
#ifdef REPAIRS
       if
       :: sent[me] == n && has(members(version(step)), me) -> differed[me] = 1
       :: else
       fi
#endif
    fi
}

#define may_follow(to)       (view[me] < (to) && has(members(version(to)), me))

proctype Owner(byte me) {
    byte n = 0;
    byte v = 0;
    byte i = 0;
    byte m = 0;
    bit is_answered = 0;
end_owning:
    do
    :: atomic {              /* Put, Delete, Repair: _apply */
           NUMBER(me, n, may_apply);
           CHOOSE;
           d_step { apply(n); n = 0; is_answered = 0 }
       }
    :: atomic {              /* HandedOver: _compare */
           may_compare(me) ->
           CHOOSE;
           d_step {
               n = handed[me]; v = handed_for[me]; compare(n, v); n = 0; v = 0; is_answered = 0
           }
       }
#ifdef SUMMARIES
    :: atomic {              /* StreamSummary: _compare */
           may_sum(me) ->
           CHOOSE;
           d_step {
               n = summed[me]; v = of_a_summary; compare(n, v); n = 0; v = 0; is_answered = 0
           }
       }
#endif
    :: d_step {              /* RingChanged */
           !stopped[me] && may_follow(1) && STEPS > 1 ->
           view[me] = 1;
           ring[me] = version(1);
#ifdef NEWCOMER_AT_ONCE
           whole[me] = 1;
           complete[me] = ring[me]
#endif
       }
#if STEPS == 3
    :: d_step { !stopped[me] && may_follow(2) -> view[me] = 2; ring[me] = version(2) }
#endif
#if LAPSES
    :: d_step {              /* the view has the holder dead, and then alive again: _end */
           !stopped[me] && lapses < LAPSES && ring[me] != NO_RING ->
           lapses = lapses + 1;
           record[me] = 0;
#ifdef NUMBER_FORGOTTEN
           number[me] = 0;
#endif
#ifndef HOLDER_INHERITS
           whole[me] = 0;
           complete[me] = NO_RING
#endif
       }
#endif
#if STOPS
    :: d_step { !stopped[me] && stops < STOPS -> stops = stops + 1; stopped[me] = 1 }
    :: d_step {              /* _notice_stall */
           stopped[me] ->
#ifndef STALL_UNNOTICED
           doubt_all();
#endif
           stopped[me] = 0
       }
#endif
#if MEMBERS1 != 3 && STEPS == 3
    :: d_step {              /* its own entry in a view is dead: it refutes */
           !stopped[me] && !has(members(1), me) && step == 1 && !refuted ->
#ifndef DEATH_UNNOTICED
           doubt_all();
#endif
           refuted = 1
       }
#endif
    od
}

init {
    d_step {
        turning = 1;
        begun[0] = 0;
        expected = 255;
        if
        :: has(MEMBERS0, 0) -> ring[0] = 0
        :: else
        fi;
        if
        :: has(MEMBERS0, 1) -> ring[1] = 0
        :: else
        fi
    };
    atomic { run Owner(0); run Owner(1) }
}
