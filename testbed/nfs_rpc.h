/*
 * ONC RPC over TCP (RFC 5531) and XDR (RFC 4506), as much of them as an NFS 3 client needs.
 *
 * One loop makes all calls; any number of them are in flight on one connection. A call is sent again on a new connection
 * when its own is lost, until its patience ends; without a patience, for ever. So a server may go and come back.
 */
#ifndef NFS_RPC_H
#define NFS_RPC_H

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_DATA = 1 << 20,               /* bytes of a file in one call */
    RECEIVED_ROOM = 2 * MOST_DATA,     /* for the longest reply, and what has come with it */
    RETRY_MS = 200,                    /* between two connections that were refused */
    CONNECT_MS = 3000,                 /* for a connection */
    UNHEARD_MS = 15000,                /* without a sign of the server's TCP: the connection is lost */
    ACCEPTED = 0,
    AUTH_UNIX_FLAVOR = 1,
    HEADER_ROOM = 1024,                /* for all that a call has but data: two names of 255 bytes are the most */
};

/* What is left to read of a reply. Reading past its end gives zeros, and sets `is_short`. */
struct reply {
    const char *at;
    size_t left;
    bool is_short;
};

/* Called once for each call: error 0, and the reply behind RPC's header; or error -EIO, and no reply. */
typedef void finish_t(void *owner, int error, struct reply *reply);

struct message {
    uint32_t xid;
    char *data;
    size_t size, sent;
    int64_t until_ms; /* 0: for ever */
    finish_t *finish;
    void *owner;
    struct message *next;
};

struct server {
    struct sockaddr_in address;
    int fd; /* -1: there is no connection */
    bool is_connected, gives_up /* when it cannot connect */;
    int patience_ms;
    int64_t connect_ms; /* when the attempt to connect began; without one, when the next may begin */
    uint32_t xid;
    struct message *waiting; /* for a reply, the oldest first; some are not sent yet */
    char *received;
    size_t received_size;
};

static inline int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static inline void *allocate(size_t size)
{
    void *memory = calloc(1, size);
    if (memory == NULL)
        abort();
    return memory;
}

/* Writing. */

static inline void put_bytes(struct message *message, const void *data, size_t size)
{
    memcpy(message->data + message->size, data, size);
    message->size += (size + 3) & ~(size_t)3; /* the memory was zero */
}

static inline void put_32(struct message *message, uint32_t value)
{
    value = htonl(value);
    put_bytes(message, &value, sizeof value);
}

static inline void put_64(struct message *message, uint64_t value)
{
    put_32(message, (uint32_t)(value >> 32));
    put_32(message, (uint32_t)value);
}

static inline void put_opaque(struct message *message, const void *data, size_t size)
{
    put_32(message, (uint32_t)size);
    put_bytes(message, data, size);
}

/* Reading. */

static inline const char *get_bytes(struct reply *reply, size_t size)
{
    static const char zeros[256];
    const size_t padded = (size + 3) & ~(size_t)3;
    if (padded > reply->left) {
        reply->is_short = true;
        reply->left = 0;
        return zeros;
    }
    const char *bytes = reply->at;
    reply->at += padded;
    reply->left -= padded;
    return bytes;
}

static inline uint32_t get_32(struct reply *reply)
{
    uint32_t value;
    memcpy(&value, get_bytes(reply, sizeof value), sizeof value);
    return ntohl(value);
}

static inline uint64_t get_64(struct reply *reply)
{
    uint64_t high = get_32(reply);
    return high << 32 | get_32(reply);
}

/* At most `most` bytes; a longer one makes the reply short. */
static inline const char *get_opaque(struct reply *reply, size_t *size, size_t most)
{
    *size = get_32(reply);
    if (*size > most || *size > reply->left) {
        reply->is_short = true;
        reply->left = *size = 0;
    }
    return get_bytes(reply, *size);
}

/* The connection. */

static inline void rpc_open(struct server *server, struct in_addr address, int port, int patience_ms)
{
    *server = (struct server){.fd = -1, .patience_ms = patience_ms, .xid = (uint32_t)(now_ms() * 7919)};
    server->address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = address};
    server->received = allocate(RECEIVED_ROOM);
}

/* Take a call from the list and give it its end. */
static inline void rpc_end(struct server *server, struct message *message, int error, struct reply *reply)
{
    struct message **place = &server->waiting;
    while (*place != message)
        place = &(*place)->next;
    *place = message->next;
    message->finish(message->owner, error, reply);
    free(message->data);
    free(message);
}

static inline void rpc_lose(struct server *server)
{
    close(server->fd);
    server->fd = -1;
    server->connect_ms = now_ms() + RETRY_MS;
    server->received_size = 0;
    for (struct message *message = server->waiting; message != NULL; message = message->next)
        message->sent = 0;
    while (server->gives_up && !server->is_connected && server->waiting != NULL)
        rpc_end(server, server->waiting, -EIO, NULL);
    server->is_connected = false;
}

/* A server that has lost its power says nothing, and TCP would wait for it for many minutes. */
static inline void rpc_watch(struct server *server)
{
    const int on = 1, idle_seconds = 5, unheard_ms = UNHEARD_MS;

    setsockopt(server->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(server->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
    setsockopt(server->fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle_seconds, sizeof idle_seconds);
    setsockopt(server->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unheard_ms, sizeof unheard_ms);
    server->is_connected = true;
}

static inline void rpc_connect(struct server *server)
{
    const int on = 1;

    server->connect_ms = now_ms();
    server->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (server->fd < 0)
        abort();
    bindresvport(server->fd, NULL); /* as mount.nfs; a server with the export option "secure" asks for it */
    setsockopt(server->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(server->fd, (struct sockaddr *)&server->address, sizeof server->address) != 0 && errno != EINPROGRESS)
        rpc_lose(server);
}

static inline void rpc_send_waiting(struct server *server)
{
    for (struct message *message = server->waiting; message != NULL; message = message->next) {
        while (message->sent < message->size) {
            ssize_t sent = send(server->fd, message->data + message->sent, message->size - message->sent, MSG_NOSIGNAL);
            if (sent < 0 && (errno == EAGAIN || errno == EINTR))
                return;
            if (sent < 0) {
                rpc_lose(server);
                return;
            }
            message->sent += (size_t)sent;
        }
    }
}

/* One whole record: find its call. A reply to a call whose patience has ended finds none. */
static inline void rpc_take(struct server *server, const char *data, size_t size)
{
    struct reply reply = {data, size, false};
    const uint32_t xid = get_32(&reply);
    struct message *message = server->waiting;
    size_t verifier_size;

    while (message != NULL && message->xid != xid)
        message = message->next;
    if (message == NULL)
        return;
    const bool is_reply = get_32(&reply) == 1;
    const bool is_accepted = get_32(&reply) == ACCEPTED;
    get_32(&reply); /* the verifier's flavor */
    get_opaque(&reply, &verifier_size, 400);
    const bool is_done = get_32(&reply) == ACCEPTED;
    rpc_end(server, message, is_reply && is_accepted && is_done && !reply.is_short ? 0 : -EIO, &reply);
}

static inline void rpc_receive(struct server *server)
{
    ssize_t got = recv(server->fd, server->received + server->received_size, RECEIVED_ROOM - server->received_size, 0);
    if (got <= 0) {
        if (got == 0 || (errno != EAGAIN && errno != EINTR))
            rpc_lose(server);
        return;
    }
    server->received_size += (size_t)got;
    size_t begin = 0;
    while (server->received_size - begin >= 4) {
        uint32_t mark;
        memcpy(&mark, server->received + begin, 4);
        mark = ntohl(mark);
        const size_t size = mark & 0x7fffffff;
        if (!(mark >> 31) || size > RECEIVED_ROOM - 4) { /* a record in parts, which no NFS server sends; or no record */
            rpc_lose(server);
            return;
        }
        if (server->received_size - begin - 4 < size)
            break;
        rpc_take(server, server->received + begin + 4, size);
        if (server->fd < 0) /* lost when the next call was sent */
            return;
        begin += 4 + size;
    }
    server->received_size -= begin;
    if (begin > 0)
        memmove(server->received, server->received + begin, server->received_size);
}

/* What to wait for. Returns for how many milliseconds at most; -1: for ever. */
static inline int rpc_wait(const struct server *server, struct pollfd *wanted)
{
    const struct message *last = server->waiting;
    while (last != NULL && last->next != NULL)
        last = last->next;
    const bool is_sending = last != NULL && last->sent < last->size;
    *wanted = (struct pollfd){.fd = server->fd};
    if (server->fd >= 0)
        wanted->events = (short)(server->is_connected ? POLLIN | (is_sending ? POLLOUT : 0) : POLLOUT);
    if (server->waiting == NULL)
        return -1;
    return server->is_connected && server->patience_ms == 0 ? -1 : RETRY_MS / 2;
}

/* Do what can be done; `events` are those of the connection. */
static inline void rpc_serve(struct server *server, int events)
{
    const int64_t now = now_ms();

    if (server->fd >= 0 && !server->is_connected && events != 0) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(server->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0)
            rpc_lose(server);
        else
            rpc_watch(server);
    }
    if (server->is_connected && events & (POLLIN | POLLERR | POLLHUP))
        rpc_receive(server);
    if (server->is_connected)
        rpc_send_waiting(server);
    if (server->fd >= 0 && !server->is_connected && !server->gives_up && now > server->connect_ms + CONNECT_MS)
        rpc_lose(server);
    for (struct message *message = server->waiting, *next; message != NULL; message = next) {
        next = message->next;
        if (message->until_ms == 0 || now <= message->until_ms)
            continue;
        if (message->sent > 0 && message->sent < message->size)
            rpc_lose(server); /* the server waits for the rest */
        rpc_end(server, message, -EIO, NULL);
    }
    if (server->fd < 0 && server->waiting != NULL && now >= server->connect_ms)
        rpc_connect(server);
}

/* The calls. */

/* Begin a call; what is put into it now are its arguments, up to `data_size` bytes beyond handles and names. */
static inline struct message *rpc_begin(struct server *server, uint32_t program, uint32_t procedure, uint32_t uid,
                                        uint32_t gid, size_t data_size)
{
    struct message *message = allocate(sizeof *message);
    message->data = allocate(HEADER_ROOM + data_size);
    message->xid = ++server->xid;
    put_32(message, 0); /* the size, in the end */
    put_32(message, message->xid);
    put_32(message, 0); /* a call */
    put_32(message, 2); /* RPC's version */
    put_32(message, program);
    put_32(message, 3); /* the program's version: both NFS and MOUNT */
    put_32(message, procedure);
    put_32(message, AUTH_UNIX_FLAVOR);
    put_32(message, 20); /* bytes of what follows */
    put_32(message, 0);  /* a time, that servers ignore */
    put_32(message, 0);  /* a host's name, of no letters */
    put_32(message, uid);
    put_32(message, gid);
    put_32(message, 0); /* further groups */
    put_64(message, 0); /* no verifier */
    return message;
}

static inline void rpc_send(struct server *server, struct message *message, finish_t *finish, void *owner)
{
    const uint32_t mark = htonl((uint32_t)(message->size - 4) | 1u << 31);
    memcpy(message->data, &mark, 4);
    message->finish = finish;
    message->owner = owner;
    message->until_ms = server->patience_ms == 0 ? 0 : now_ms() + server->patience_ms;
    struct message **end = &server->waiting;
    while (*end != NULL)
        end = &(*end)->next;
    *end = message;
    if (server->is_connected)
        rpc_send_waiting(server);
}

#endif
