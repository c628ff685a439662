/* Pages that move between two nodes: spill, second copies, drain; and their removal meanwhile.
 *
 * What is modelled, what is left out, and what was found: README.md in this folder.
 * `check.py` verifies this text as it is, and refutes it with each of the mutations (-D...) below.
 *
 * One page of one key. Each of the two nodes may offer it to the other one. A read is one step of
 * a begin and one of an end: read_protocol.pml shows that a hit has what the giver had throughout.
 */

#ifndef OFFERS
#define OFFERS 1             /* of each node */
#endif
#ifndef BOTH_HOLD
#define BOTH_HOLD 0          /* whether both nodes have the page at the begin */
#endif
#ifndef PAUSES
#define PAUSES 0             /* how often a node may be paused */
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SETS
#define SETS 0               /* how often the page is set again at node 0, after its removal */
#endif
#ifndef WITNESS
#define WITNESS true
#endif

#define peer                 (1 - me)

/* The number tells the violated one in the checker's output: `check.py` knows their names. */
#define CHECK(number, condition) assert(0 == number || (condition))
#define REMOVED 1            /* a node that has removed the page does not have it again */
#define FOUND 2              /* a page is not lost because it was given away */
#define BYTES 3              /* right bytes are not replaced, and wrong ones leave with their origin */
#define WITNESSED 6

/* --- what the nodes have: actors/pool/actor.py ---------------------------------------------------- */

byte memory[2];              /* the word of the page's slot: 0, or the number of its commit */
byte commits[2];
bit  wrong[2];               /* the bytes are not those of the page: a Byzantine member made them */
bit  taken[2];               /* it came from the other node: it is kept under its space only */
bit  known[2];               /* the owners of its record have acknowledged it */
bit  named[2];               /* named_touched: nothing has touched it since it was offered */
bit  withheld[2];            /* never offered: this node may have missed its removal */
bit  voids[2];                /* Mirrors: a removal is under way, or may be */
bit  dead[2];
bit  noticed[2];             /* every view has it dead */
bit  paused[2];
byte pauses;
byte deaths;
byte sets;

#define holds(i)             (!dead[i] && memory[i])
#define runs(i)              (!dead[i] && !paused[i])

/* --- offers: actors/placement/offers.py, actors/placement/takings.py; by the node that offers -------- */

mtype = { NO_OFFER, SENT, WAITING, RESERVED, READING, READ, COMMITTED, HERE, ANSWERED };
mtype offer[2] = NO_OFFER;
byte offered[2];             /* which commit */
bit  is_void[2];             /* a removal came to the taker after the offer */
bit  has_arrived[2];         /* the bytes were read, and verified by the giver's seal */
bit  wrong_read[2];
bit  is_late[2];             /* the taker was paused meanwhile */
bit  kept[2];                /* PagesTaken: the taker has the page, and the owners know */
byte offers[2];

/* --- a removal: actors/removal/actor.py ------------------------------------------------------------- */

mtype = { NO_REMOVAL, UNDER_WAY, OVER };
mtype removal = NO_REMOVAL;
bit  has_removed[2];         /* this node has handled it */
bit  missed[2];              /* its client was informed that this node has not answered in time */
bit  unreachable;            /* some node was merely unreachable: neither paused nor suspected */

/* --- a revocation: node/revocations.py -------------------------------------------------------------- */

bit  revoked;                /* node 1 has dropped what came from other nodes */

/* --- what is promised ------------------------------------------------------------------------------- */

bit  excused = 1;             /* the page was evicted for lack of room, or died with its node */

#define is_back(i)           (holds(i) && has_removed[i] && !unreachable)
#define is_found(i)          (holds(i) && known[i] && !wrong[i])
#define is_lost              (removal == NO_REMOVAL && !excused && !is_found(0) && !is_found(1))

#ifdef BYZANTINE_GIVER
#define are_right            (!(revoked && holds(1) && wrong[1]) && !(BOTH_HOLD && holds(1) && \
                              wrong[1] && !taken[1]))
#elif defined(WRONG_COPY)
#define are_right            true          /* node 1 has it of a Byzantine member: is_lost counts it not */
#else
#define are_right            (!(holds(0) && wrong[0]) && !(holds(1) && wrong[1]))
#endif

active proctype Promises() {
end_watching:
    do
    :: d_step { is_back(0) || is_back(1) -> CHECK(REMOVED, false) }
#if !defined(BYZANTINE_TAKER) && !defined(BYZANTINE_GIVER)
    :: d_step { is_lost -> CHECK(FOUND, false) }
#endif
    :: d_step { !are_right -> CHECK(BYTES, false) }
    :: d_step { !(WITNESS) -> CHECK(WITNESSED, false) }
    od
}

/* --- a node ----------------------------------------------------------------------------------------- */

/* What an end of the page leaves behind: fewer states. */
inline drop(i) {
    memory[i] = 0; known[i] = 0; taken[i] = 0; wrong[i] = 0; withheld[i] = 0;
#ifndef GENERATION_IGNORED
    named[i] = 0
#endif
}

inline finish(i) {
    offer[i] = NO_OFFER; offered[i] = 0; is_void[i] = 0; has_arrived[i] = 0; wrong_read[i] = 0;
    kept[i] = 0; is_late[i] = 0
}

inline answer(i, has_it) {
    offer[i] = ANSWERED; kept[i] = has_it; is_void[i] = 0; has_arrived[i] = 0; wrong_read[i] = 0;
    is_late[i] = 0
}

#ifdef OFFERED_THOUGH_PAUSED
#define may_offer(i)         true
#else
#define may_offer(i)         (!withheld[i])
#endif

/* A removal voids the offers that wait here, and those that are read. */
#ifdef WAITING_OFFER_TAKEN
#define waits_void(i)        (offer[i] == RESERVED || offer[i] == READING || offer[i] == READ)
#else
#define waits_void(i)        (offer[i] == WAITING || offer[i] == RESERVED || offer[i] == READING || \
                              offer[i] == READ)
#endif

#ifdef VOID_IN_FLIGHT_ONLY
#define is_refused           is_void[peer]
#else
#define is_refused           (is_void[peer] || voids[me])
#endif

#ifdef REMOVED_BUT_COMMITTED
#define may_commit           has_arrived[peer]
#else
#define may_commit           (has_arrived[peer] && !is_void[peer])
#endif

/* A dead node's memory is mapped until its death is noticed. A revoked node is not read. */
#define is_readable          (!noticed[peer] && !(revoked && me == 1) && \
                              memory[peer] == offered[peer])

#ifdef BYZANTINE_GIVER
#define is_served            (!(revoked && me == 1))    /* it seals what it serves as it likes */
#define has_wrong_bytes      (peer == 0 || wrong[peer])
#else
#ifdef UNVERIFIED
#define is_served            true
#define has_wrong_bytes      (wrong[peer] || memory[peer] != offered[peer])
#else
#define is_served            is_readable
#define has_wrong_bytes      wrong[peer]
#endif
#endif

#ifdef ANSWERED_UNKNOWN
#define may_report           true
#else
#define may_report           known[me]
#endif

/* The checksum of the offer is that of the page that is here. */
#ifdef OTHER_BYTES_COUNT
#define has_same_bytes       true
#else
#define has_same_bytes       (wrong[me] == wrong[peer] || !memory[peer])
#endif

#ifdef GIVEN_BY_BOTH
#define is_named             true
#else
#define is_named             named[me]
#endif
#ifdef GENERATION_IGNORED
#define is_same              true
#else
#define is_same              (memory[me] == offered[me])
#endif

proctype Node(byte me) {
end_serving:
    do
    :: d_step {              /* OfferSpill: pages are offered, and kept until they are elsewhere */
           runs(me) && memory[me] && offer[me] == NO_OFFER && offers[me] < OFFERS && may_offer(me) ->
           offers[me] = offers[me] + 1;
           offer[me] = SENT;
           offered[me] = memory[me];
           named[me] = 1
       }

    :: d_step {              /* Takings.offered: it waits until one of the places is free */
           runs(me) && offer[peer] == SENT ->
           offer[peer] = WAITING;
#ifndef VOID_IN_FLIGHT_ONLY
           is_void[peer] = voids[me]
#endif
       }

    :: d_step {              /* Pool._take_over */
           runs(me) && offer[peer] == WAITING ->
           if
           :: is_refused -> answer(peer, 0)
           :: !is_refused && memory[me] -> named[me] = 0; offer[peer] = HERE
           :: !is_refused && !memory[me] -> offer[peer] = RESERVED
           fi
       }

    :: d_step {              /* no room, or only hotter pages */
           runs(me) && offer[peer] == WAITING -> answer(peer, 0)
       }

#ifdef BYZANTINE_TAKER
    :: d_step { me == 1 && offer[peer] == WAITING -> answer(peer, 1) }     /* it has no page */
#endif

    :: d_step {              /* Pull: the first look */
           runs(me) && offer[peer] == RESERVED -> offer[peer] = READING
       }
    :: d_step {              /* the last look */
           runs(me) && offer[peer] == READING ->
           if
           :: is_served -> has_arrived[peer] = 1; wrong_read[peer] = has_wrong_bytes
           :: else
           fi;
           offer[peer] = READ
       }

    :: d_step {              /* TakenOver: Pool._taken_over */
           runs(me) && offer[peer] == READ && commits[me] < 3 ->
           if
           :: may_commit && !memory[me] ->
              commits[me] = commits[me] + 1;
              memory[me] = commits[me];
#ifndef ORIGIN_FORGOTTEN
              taken[me] = 1;
#endif
              wrong[me] = wrong_read[peer];
              withheld[me] = is_late[peer];
              offer[peer] = COMMITTED
           :: may_commit && memory[me] -> named[me] = 0; offer[peer] = HERE
           :: !may_commit -> answer(peer, 0)
           fi
       }

    :: d_step { runs(me) && memory[me] && !known[me] -> known[me] = 1 }    /* the owners know it */

    :: d_step {              /* Takings.committed: PagesTaken */
           runs(me) && (offer[peer] == COMMITTED || offer[peer] == HERE) ->
           if
           :: memory[me] && may_report && (offer[peer] == COMMITTED || has_same_bytes) ->
              answer(peer, 1)
           :: else -> answer(peer, 0)
           fi
       }

    :: d_step {              /* PagesGiven: Pool._give */
           runs(me) && offer[me] == ANSWERED ->
           if
           :: kept[me] && memory[me] && is_same && is_named -> drop(me)
           :: else
           fi;
           finish(me)
       }

    :: d_step { runs(me) && memory[me] && named[me] -> named[me] = 0 }     /* a client reads it */

    :: d_step { runs(me) && memory[me] -> drop(me); excused = 1 }          /* it is evicted */

    :: d_step {              /* Remove: it may come long after the client has its answer */
           runs(me) && removal != NO_REMOVAL && !has_removed[me] ->
           drop(me);
           has_removed[me] = 1;
           voids[me] = 1;
           if
           :: waits_void(peer) -> is_void[peer] = 1
           :: else
           fi
       }

    :: d_step {              /* the time of the removal is over; no offer is under way for so long */
           voids[me] && removal == OVER && offer[peer] != SENT -> voids[me] = 0
       }

#if PAUSES
    :: d_step { runs(me) && pauses < PAUSES -> pauses = pauses + 1; paused[me] = 1 }
    :: d_step {              /* Offers.on_tick: what it has now, or is reading, may be removed elsewhere */
           !dead[me] && paused[me] ->
           paused[me] = 0;
           withheld[me] = (memory[me] -> 1 : 0);
#ifndef WITHHELD_AT_ONCE
           if
           :: offer[peer] == RESERVED || offer[peer] == READING || offer[peer] == READ ->
              is_late[peer] = 1
           :: else
           fi
#endif
       }
#endif
#if DEATHS
    :: d_step {
           !dead[me] && deaths < DEATHS ->
           deaths = deaths + 1;
           dead[me] = 1;
           excused = excused || memory[me];
           finish(peer);     /* what it takes, it takes no more */
           named[me] = 0
       }
    :: d_step { dead[me] && !noticed[me] -> noticed[me] = 1; finish(me) }
#endif
    od
}

/* --- who removes ------------------------------------------------------------------------------------ */

#ifdef UNREACHABLE
#define may_miss(i)          (!has_removed[i])
#else
#define may_miss(i)          (!has_removed[i] && paused[i])
#endif
#define is_waited_for(i)     (!has_removed[i] && !noticed[i] && !may_miss(i))

#ifdef REMOVAL
active proctype Client() {
    removal = UNDER_WAY;
end_removing:
    d_step {
        !is_waited_for(0) && !is_waited_for(1) ->
        missed[0] = may_miss(0);
        missed[1] = may_miss(1);
        unreachable = missed[0] && !paused[0] || missed[1] && !paused[1];
        removal = OVER
    };
#if SETS
end_setting:
    d_step {                 /* the client stores the page again: a removal is not due any more */
        runs(0) && !memory[0] && has_removed[0] && has_removed[1] && commits[0] < 3 ->
        has_removed[0] = 0; has_removed[1] = 0; missed[0] = 0; missed[1] = 0;
        removal = NO_REMOVAL;
        excused = 0;
        commits[0] = commits[0] + 1;
        memory[0] = commits[0];
        known[0] = 1
    }
#endif
}
#endif

#ifdef REVOCATION
active proctype Revocation() {
end_revoking:
    d_step {                 /* Clear of all that came from other nodes */
        runs(1) ->
        if
        :: taken[1] -> drop(1); excused = 1
        :: else
        fi;
#ifndef REVOKED_IN_FLIGHT
        if
        :: waits_void(0) -> is_void[0] = 1
        :: else
        fi;
#endif
        revoked = 1
    }
}
#endif

init {
    d_step {
        excused = 0;
        commits[0] = 1;
        memory[0] = 1;
        known[0] = 1;
#ifdef BYZANTINE_GIVER
        wrong[0] = 1;
#endif
#if BOTH_HOLD
        commits[1] = 1;
        memory[1] = 1;
#ifdef WRONG_COPY
        wrong[1] = 1;
        taken[1] = 1;
#endif
        known[1] = 1
#endif
    };
    atomic { run Node(0); run Node(1) }
}
