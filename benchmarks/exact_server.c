/* A completion server whose every token has an exact time, and which keeps a record of when it really sent it.
 *
 *   cc -O2 -o exact_server exact_server.c
 *   ./exact_server FIRST_MS GAP_MS TOKENS_PER_CHUNK EARLY_CHUNK     prints its port and whether it runs in real time
 *
 * Streams /v1/completions and /v1/chat/completions as vLLM does: max_tokens tokens, the first chunk FIRST_MS after the
 * request arrived, then one chunk of TOKENS_PER_CHUNK every GAP_MS on an absolute grid; EARLY_CHUNK=1 sends a chunk
 * without tokens at once. GET /record answers with, and forgets, one line per finished request:
 *     id arrived_ns read_ns chunk_tokens sent_ns sent_ns ...
 * in CLOCK_MONOTONIC nanoseconds (Python's perf_counter on Linux). id is the first token id of the prompt, -1 for text;
 * arrived_ns is when the kernel had the request's last byte, read_ns when this process got to it; sent_ns is taken just
 * before the write of each chunk that has tokens. One thread, epoll and a timerfd; SCHED_RR where it is allowed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 8192
#define MAX_EVENTS 512

typedef struct {
    int open, streaming, heap_at, chat, usage_each, usage_end;
    char *in;
    size_t have, room;
    long id, prompt_tokens, asked, done;
    int64_t arrived, read_at, due;
    int64_t *sent;
    long sent_count, sent_room;
} Conn;

static Conn conns[MAX_FD];
static int heap[MAX_FD], heap_size;
static int64_t first_ns, gap_ns;
static long tokens_per_chunk;
static int early_chunk, epoll_fd, timer_fd;
static char *record;
static size_t record_size, record_room;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The heap of connections whose next chunk is due, the earliest first. */
static void heap_put(int at, int fd) {
    heap[at] = fd;
    conns[fd].heap_at = at;
}

static void heap_fix(int at) {
    int fd = heap[at];
    while (at > 0 && conns[heap[(at - 1) / 2]].due > conns[fd].due) {
        heap_put(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (int child; (child = 2 * at + 1) < heap_size; at = child) {
        if (child + 1 < heap_size && conns[heap[child + 1]].due < conns[heap[child]].due) child++;
        if (conns[heap[child]].due >= conns[fd].due) break;
        heap_put(at, heap[child]);
    }
    heap_put(at, fd);
}

static void heap_add(int fd) {
    heap_put(heap_size++, fd);
    heap_fix(heap_size - 1);
}

static void heap_remove(int fd) {
    int at = conns[fd].heap_at, last = heap[--heap_size];
    if (last == fd) return;
    heap_put(at, last);
    heap_fix(at);
}

static void arm_timer(void) {
    struct itimerspec when = {{0, 0}, {0, 0}};
    if (heap_size) {
        int64_t due = conns[heap[0]].due;
        when.it_value.tv_sec = due / 1000000000;
        when.it_value.tv_nsec = due % 1000000000;
    }
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void close_conn(int fd) {
    if (conns[fd].streaming) heap_remove(fd);
    conns[fd].open = conns[fd].streaming = 0;
    conns[fd].have = 0;
    close(fd);
}

/* The client always takes what little is sent; one that does not is cut off. */
static void send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            usleep(100);
            continue;
        }
        if (n <= 0) {
            close_conn(fd);
            return;
        }
        data += n;
        size -= (size_t)n;
    }
}

static int usage_text(char *out, size_t room, const Conn *c) {
    return snprintf(out, room, "{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld}",
                    c->prompt_tokens, c->prompt_tokens + c->done, c->done);
}

static int event_text(char *out, size_t room, const Conn *c, long tokens, int last) {
    char text[256] = "", usage[128] = "", choice[512];
    for (long i = 0; i < tokens && i < 100; i++) strcat(text, " a");
    const char *finish = last ? "\"length\"" : "null";
    if (c->chat)
        snprintf(choice, sizeof choice, "{\"index\":0,\"delta\":{%s\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":%s}",
                 c->done == tokens ? "\"role\":\"assistant\"," : "", text, finish);
    else
        snprintf(choice, sizeof choice, "{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null}",
                 text, finish);
    if (c->usage_each) usage_text(usage, sizeof usage, c);
    char body[1024];
    int size = snprintf(body, sizeof body,
                        "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"%s\",\"created\":1700000000,"
                        "\"model\":\"exact\",\"choices\":[%s]%s%s}\n\n",
                        c->chat ? "chat.completion.chunk" : "text_completion", choice, *usage ? ",\"usage\":" : "", usage);
    return snprintf(out, room, "%x\r\n%s\r\n", size, body);
}

static int end_text(char *out, size_t room, const Conn *c) {
    char usage[128], body[512];
    int at = 0;
    if (c->usage_end) {
        usage_text(usage, sizeof usage, c);
        int size = snprintf(body, sizeof body,
                            "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"%s\",\"created\":1700000000,"
                            "\"model\":\"exact\",\"choices\":[],\"usage\":%s}\n\n",
                            c->chat ? "chat.completion.chunk" : "text_completion", usage);
        at = snprintf(out, room, "%x\r\n%s\r\n", size, body);
    }
    return at + snprintf(out + at, room - (size_t)at, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
}

static void keep_record(const Conn *c) {
    size_t need = record_size + 128 + (size_t)c->sent_count * 24;
    if (need > record_room && !(record = realloc(record, record_room = 2 * need))) die("record");
    record_size += (size_t)sprintf(record + record_size, "%ld %ld %ld %ld", c->id, c->arrived, c->read_at, tokens_per_chunk);
    for (long i = 0; i < c->sent_count; i++) record_size += (size_t)sprintf(record + record_size, " %ld", c->sent[i]);
    record[record_size++] = '\n';
}

static void send_chunk(int fd) {
    Conn *c = &conns[fd];
    char out[2048];
    long tokens = c->asked - c->done < tokens_per_chunk ? c->asked - c->done : tokens_per_chunk;
    c->done += tokens;
    int last = c->done >= c->asked, size = event_text(out, sizeof out, c, tokens, last);
    if (c->sent_count == c->sent_room &&
        !(c->sent = realloc(c->sent, sizeof(int64_t) * (size_t)(c->sent_room = 2 * c->sent_room + 64))))
        die("sent");
    if (last) {
        c->streaming = 0;
        heap_remove(fd);
    } else {
        c->due += gap_ns;
        heap_fix(c->heap_at);
    }
    c->sent[c->sent_count++] = now_ns(CLOCK_MONOTONIC);
    send_all(fd, out, (size_t)size);
    if (last) {
        keep_record(c);
        size = end_text(out, sizeof out, c);
        if (c->open) send_all(fd, out, (size_t)size);
    }
}

static long number_after(const char *body, const char *key, long otherwise) {
    const char *found = strstr(body, key);
    return found ? strtol(found + strlen(key), NULL, 10) : otherwise;
}

static int says_true(const char *body, const char *key) {
    const char *found = strstr(body, key);
    if (!found) return 0;
    for (found += strlen(key); *found == ' ' || *found == ':' || *found == '"';) found++;
    return *found == 't';
}

static void answer(int fd, const char *kind, const char *body, size_t size) {
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", kind, size);
    send_all(fd, head, (size_t)n);
    if (conns[fd].open) send_all(fd, body, size);
}

static void begin_stream(int fd, const char *path, const char *body, int64_t arrived, int64_t read_at) {
    static const char head[] = "HTTP/1.1 200 OK\r\nserver: exact\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";
    Conn *c = &conns[fd];
    c->chat = strncmp(path, "/v1/chat", 8) == 0;
    c->usage_each = says_true(body, "\"continuous_usage_stats");
    c->usage_end = says_true(body, "\"include_usage");
    c->id = -1;
    c->prompt_tokens = 1;
    const char *prompt = strstr(body, "\"prompt\":");
    if (prompt && (prompt = strpbrk(prompt + 9, "[\"")) && *prompt == '[') {
        c->id = strtol(prompt + 1, NULL, 10);
        for (; *prompt && *prompt != ']'; prompt++) c->prompt_tokens += *prompt == ',';
    }
    c->asked = number_after(body, "\"max_tokens\":", number_after(body, "\"max_completion_tokens\":", 16));
    c->done = c->sent_count = 0;
    c->arrived = arrived;
    c->read_at = read_at;
    c->due = arrived + first_ns;
    c->streaming = 1;
    heap_add(fd);
    send_all(fd, head, sizeof head - 1);
    if (early_chunk && c->open) {
        char out[2048];
        int size = event_text(out, sizeof out, c, 0, 0);
        send_all(fd, out, (size_t)size);
    }
}

static void handle(int fd, const char *request, const char *body, int64_t arrived, int64_t read_at) {
    const char *path = strchr(request, ' ');
    path = path ? path + 1 : "";
    if (!strncmp(path, "/v1/completions", 15) || !strncmp(path, "/v1/chat/completions", 20)) {
        begin_stream(fd, path, body, arrived, read_at);
    } else if (!strncmp(path, "/record", 7)) {
        answer(fd, "text/plain", record, record_size);
        record_size = 0;
    } else if (!strncmp(path, "/v1/models", 10)) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"exact\",\"object\":\"model\",\"created\":1700000000,"
                                     "\"owned_by\":\"exact\",\"max_model_len\":131072}]}";
        answer(fd, "application/json", models, sizeof models - 1);
    } else {
        answer(fd, "application/json", "{}", 2);
    }
}

static void receive(int fd) {
    Conn *c = &conns[fd];
    if (c->room - c->have < 65536 && !(c->in = realloc(c->in, c->room = 2 * c->room + 131072))) die("buffer");
    char control[256];
    struct iovec io = {c->in + c->have, c->room - c->have - 1};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &message, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        close_conn(fd);
        return;
    }
    int64_t read_at = now_ns(CLOCK_MONOTONIC), arrived = read_at;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
        if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SO_TIMESTAMPNS) {
            struct timespec t;
            memcpy(&t, CMSG_DATA(h), sizeof t);
            arrived = read_at - (now_ns(CLOCK_REALTIME) - ((int64_t)t.tv_sec * 1000000000 + t.tv_nsec));
        }
    c->have += (size_t)n;
    c->in[c->have] = 0;
    char *body = memmem(c->in, c->have < 16384 ? c->have : 16384, "\r\n\r\n", 4);
    if (!body) return;
    body += 4;
    size_t length = 0;
    for (char *line = c->in; line && line < body; line = (line = strstr(line, "\r\n")) ? line + 2 : NULL)
        if (!strncasecmp(line, "content-length:", 15)) length = (size_t)atol(line + 15);
    if (c->have < (size_t)(body - c->in) + length) return;
    c->have = 0;
    handle(fd, c->in, body, arrived, read_at);
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FD) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
        conns[fd].open = 1;
        conns[fd].have = 0;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s FIRST_MS GAP_MS TOKENS_PER_CHUNK EARLY_CHUNK\n", argv[0]);
        return 2;
    }
    first_ns = (int64_t)(atof(argv[1]) * 1e6);
    gap_ns = (int64_t)(atof(argv[2]) * 1e6);
    tokens_per_chunk = atol(argv[3]);
    early_chunk = atoi(argv[4]);
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct sched_param priority = {.sched_priority = 1};
    int real_time = sched_setscheduler(0, SCHED_RR, &priority) == 0;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event of_listener = {.events = EPOLLIN, .data.fd = listener};
    struct epoll_event of_timer = {.events = EPOLLIN, .data.fd = timer_fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &of_listener);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &of_timer);
    record = malloc(record_room = 1 << 20);
    printf("%d %d\n", ntohs(address.sin_port), real_time);
    fflush(stdout);
    struct epoll_event events[MAX_EVENTS];
    for (;;) {
        int n = epoll_wait(epoll_fd, events, MAX_EVENTS, -1);
        while (heap_size && conns[heap[0]].due <= now_ns(CLOCK_MONOTONIC)) send_chunk(heap[0]);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            uint64_t expirations;
            if (fd == listener) accept_all(listener);
            else if (fd == timer_fd) (void)!read(timer_fd, &expirations, sizeof expirations);
            else if (conns[fd].open) receive(fd);
            while (heap_size && conns[heap[0]].due <= now_ns(CLOCK_MONOTONIC)) send_chunk(heap[0]);
        }
        arm_timer();
    }
}
